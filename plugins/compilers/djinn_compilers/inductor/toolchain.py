"""C++ toolchain that inductor needs in addition to PyTorch."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

_COMPILERS: Final = ("g++", "clang++", "c++")
_QUICK_LINKERS: Final = ("ld.mold", "ld.lld", "ld.gold")
_PROGRAMS: Final = "COMPILER_PATH"  # folders that C++ compilers search first for a linker


def missing_toolchain() -> str:
    """Return missing prerequisites with advice, or an empty text if inductor can work."""
    compiler = os.environ.get("CXX")
    for name in (compiler,) if compiler else _COMPILERS:
        if shutil.which(name):
            return ""
    return (
        f"inductor needs a C++ compiler, and this machine has none of {', '.join((compiler,) if compiler else _COMPILERS)}: "
        "install one (`apt-get install g++`), or set CXX"
    )


@contextmanager
def quick_linker() -> Iterator[None]:
    """Context manager in which C++ compilers use a linker that takes a third of the usual time, if it is installed."""
    linker = next(filter(None, map(shutil.which, _QUICK_LINKERS)), None)
    if linker is None or _PROGRAMS in os.environ:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="djinn-linker-") as folder:
        (Path(folder) / "ld").symlink_to(linker)
        os.environ[_PROGRAMS] = folder
        try:
            yield
        finally:
            del os.environ[_PROGRAMS]
