"""Toolchain that inductor needs besides PyTorch."""

from __future__ import annotations

import os
import shutil
from typing import Final

_COMPILERS: Final = ("g++", "clang++", "c++")


def missing_toolchain() -> str:
    """Missing prerequisites, and what to do about them; empty if inductor can work."""
    wanted = os.environ.get("CXX")
    for name in (wanted,) if wanted else _COMPILERS:
        if shutil.which(name):
            return ""
    return (
        f"inductor needs a C++ compiler, and this machine has none of {', '.join((wanted,) if wanted else _COMPILERS)}: "
        "install one (`apt-get install g++`), or set CXX"
    )
