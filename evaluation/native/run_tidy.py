"""clang-tidy on the C++ of djinn_native and of plugins: `python -m evaluation clang-tidy [FILE ...]`."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from evaluation import ROOT

NATIVE = ROOT / "djinn_native"
BUILD = NATIVE / "build"


def main() -> int:
    """Check the named files, or all."""
    BUILD.mkdir(exist_ok=True)
    flags = [sys.executable, NATIVE / "building" / "compiler_flags.py"]
    (BUILD / "compile_flags.txt").write_bytes(subprocess.run(flags, stdout=subprocess.PIPE, check=True).stdout)
    tidy = [
        Path(sys.executable).with_name("clang-tidy"),
        "--quiet",
        f"--config-file={NATIVE / '.clang-tidy'}",
        "-p",
        BUILD,
    ]
    files = sys.argv[1:] or sorted(
        [*NATIVE.glob("csrc/*.cpp"), *ROOT.glob("djinn_server/*/csrc/*.cpp"), *ROOT.glob("plugins/*/*/csrc/*.cpp")]
    )
    with ThreadPoolExecutor(2) as pool:  # a file takes minutes and a gigabyte, most of it for PyTorch's headers
        return_codes = list(pool.map(lambda file: subprocess.run([*tidy, file], check=False).returncode, files))
    return int(any(return_codes))


if __name__ == "__main__":
    sys.exit(main())
