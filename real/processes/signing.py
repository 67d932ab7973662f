"""Values in a store that others may write to. They count only if they are signed with the secret of the ranks.

Names of keys are also derived from the secret. Values are signed, not hidden.
"""

import hmac
from collections.abc import Sequence
from dataclasses import dataclass

from torch.distributed import Store  # type: ignore[attr-defined]

from simdist.errors import RunError

_SIGNATURE_NBYTES = 64  # hexadecimal


@dataclass(frozen=True, slots=True)
class SignedStore:
    """Reads and writes signed texts.

    Args:
        store: A store that any process that reaches it may change.
        secret: A secret that only the ranks know. An empty one excludes no process.
    """

    store: Store
    secret: bytes

    def add(self, key: str) -> int:
        """Add 1 to a counter and return it."""
        return int(self.store.add(self._name(key), 1))

    def set(self, key: str, text: str) -> None:
        """Write a text."""
        self.store.set(self._name(key), self._sign("value", key, text) + text)

    def propose(self, key: str, text: str) -> str:
        """Write a text unless there is one, and return the one that is there then.

        Raises:
            RunError: It is not signed.
        """
        name = self._name(key)
        found = self._verified(key, self.store.compare_set(name, "", self._sign("value", key, text) + text))
        if found is None:
            raise RunError(f"the store has an unsigned value of {key!r}: another program writes to it")
        return found

    def get(self, key: str) -> str | None:
        """Return a text; None if there is none, or an unsigned one."""
        return self.multi_get([key])[0] if self.check(key) else None

    def check(self, key: str) -> bool:
        """Return whether a key exists; `multi_get` checks its signature."""
        return bool(self.store.check([self._name(key)]))

    def multi_get(self, keys: Sequence[str]) -> list[str | None]:
        """Return the texts of existing keys; None for unsigned ones."""
        found = self.store.multi_get([self._name(key) for key in keys]) if keys else []
        return [self._verified(key, value) for key, value in zip(keys, found, strict=True)]

    def _verified(self, key: str, value: bytes) -> str | None:
        text = value[_SIGNATURE_NBYTES:].decode(errors="replace")
        signed = hmac.compare_digest(value[:_SIGNATURE_NBYTES], self._sign("value", key, text).encode())
        return text if signed else None

    def _name(self, key: str) -> str:
        return self._sign("key", key)

    def _sign(self, *parts: str) -> str:
        return hmac.digest(self.secret, "\0".join(parts).encode(), "sha256").hex()
