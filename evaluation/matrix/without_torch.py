"""Checks of interpreter-dependent code without PyTorch, for versions of Python without a PyTorch build."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

from djinn_core.system import native_stack

ROOT = Path(__file__).resolve().parents[2]


def check_native_stack() -> None:
    """Check the native stack as `tests/system/test_native_stack.py` does."""
    entry = native_stack._entry
    assert entry is not None

    def entries() -> int:
        return sum(native_stack._function_at(address) == entry for address in native_stack._addresses())

    assert max([1], key=lambda _: entries() - here) if (here := entries()) else True
    assert [*map(lambda _: entries() - here, [0])] == [1]  # noqa: C417 - called by C is what is looked at
    assert not native_stack.is_on_stack(b"libtorch")


def check_syntax() -> None:
    """Check that all of Djinn compiles without deprecation warnings."""
    warnings.simplefilter("error")
    for folder in ("djinn", "djinn_core", "djinn_client", "djinn_server", "plugins"):
        for path in (ROOT / folder).rglob("*.py"):
            compile(path.read_text(), str(path), "exec")


if __name__ == "__main__":
    check_native_stack()
    check_syntax()
    print(f"native stack and syntax are right on {sys.version.split()[0]}")
