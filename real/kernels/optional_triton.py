# mypy: disable-error-code="import-not-found, import-untyped, assignment"
"""Triton where it is installed. Elsewhere, modules with kernels can be imported, but not used."""

from types import SimpleNamespace

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = tl = SimpleNamespace(jit=lambda kernel=None, **_: kernel or (lambda each: each), constexpr=int)

__all__ = ["tl", "triton"]
