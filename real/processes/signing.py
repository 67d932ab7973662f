"""Values in a store that others may write to: they count only if they are signed with the secret of the ranks.

Names of keys are made of the secret, too, so that without it none can be overwritten. Values are signed, not hidden.
"""

import hmac
from collections.abc import Sequence
from dataclasses import dataclass

from torch.distributed import Store  # type: ignore[attr-defined]

_SIGNATURE_NBYTES = 64  # hexadecimal


@dataclass(frozen=True, slots=True)
class SignedStore:
    """Reads and writes signed texts.

    Args:
        store: Any process that reaches it may change it.
        secret: Known to the ranks alone. An empty one keeps no process out.
    """

    store: Store
    secret: bytes

    def add(self, key: str) -> int:
        """Add 1 to a counter and return it."""
        return int(self.store.add(self._name(key), 1))

    def set(self, key: str, text: str) -> None:
        """Write a text."""
        self.store.set(self._name(key), self._sign("value", key, text) + text)

    def check(self, key: str) -> bool:
        """Return whether something is there; whether it is signed, `multi_get` finds out."""
        return bool(self.store.check([self._name(key)]))

    def multi_get(self, keys: Sequence[str]) -> list[str | None]:
        """Return the texts of keys that are there; None for what is not signed."""
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
