"""Check for a C++ compiler, and name the package that has one. `make venv` runs this before it downloads anything."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

WINDOWS_PARTS = "Microsoft.VisualStudio.Component.VC.Tools.x86.x64"
CURES = {
    "linux": "apt-get install g++ (Debian, Ubuntu) or dnf install gcc-c++ (Fedora)",
    "darwin": "xcode-select --install",
    "win32": "install the Build Tools for Visual Studio with the workload for C++",
}


def missing_compiler(platform: str = sys.platform) -> str:
    """Return one line that says how to get a C++ compiler; an empty string if there is one."""
    named = os.environ.get("CXX", "")
    if named and platform != "win32":  # PyTorch's build reads CXX, except with MSVC
        found = shutil.which(named.split()[0]) is not None
        return "" if found else f"djinn-native: the compiler that CXX names was not found: {named}"
    if _has_compiler(platform):
        return ""
    return f"djinn-native needs a C++ compiler, and none was found: {CURES.get(platform, CURES['linux'])}"


def _has_compiler(platform: str) -> bool:
    if platform == "darwin":  # /usr/bin/c++ exists even without the tools, and then only offers to install them
        return shutil.which("xcode-select") is not None and _output("xcode-select", "-p") != ""
    if platform == "win32":
        folder = os.environ.get("PROGRAMFILES(X86)", "C:\\Program Files (x86)")
        finder = Path(folder, "Microsoft Visual Studio", "Installer", "vswhere.exe")
        wanted = ("-latest", "-products", "*", "-requires", WINDOWS_PARTS, "-property", "installationPath")
        return shutil.which("cl") is not None or (finder.exists() and _output(str(finder), *wanted) != "")
    return shutil.which("c++") is not None


def _output(*command: str) -> str:
    """Return the output of a command; empty if it fails."""
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else ""


if __name__ == "__main__":
    sys.exit(missing_compiler() or 0)
