"""Random programs on the C++ of djinn_native under sanitizers of addresses and undefined behaviour; needs gcc.

python -m evaluation sanitizers [--programs 100000] [--seed 0]
python -m evaluation sanitizers --program FILE [ARGS]       # another program
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

from evaluation import ROOT

LIBRARY = ROOT / "build" / "sanitized"


def build() -> None:
    """Compile a copy of the package with a library of its own."""
    environment = {"MAX_JOBS": "2"} | os.environ | {"DJINN_NATIVE_SANITIZE": "address,undefined"}
    command = [sys.executable, "setup.py", "--quiet", "build", "--build-lib", str(LIBRARY)]
    subprocess.run(command, cwd=ROOT / "djinn_native", env=environment, check=True)


def _library(name: str) -> str:
    command = ["c++", f"-print-file-name={name}"]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


def main() -> int:
    """Build, and run a program on it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", default="evaluation/native/random_programs.py", help="instead of random programs")
    options, arguments = parser.parse_known_args()
    build()
    # PYTHONSAFEPATH keeps the checkout's package from being found first. libstdc++ lets libasan catch exceptions.
    environment = os.environ | {
        "LD_PRELOAD": f"{_library('libasan.so')} {_library('libstdc++.so')}",
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONSAFEPATH": "1",
        "PYTHONPATH": str(LIBRARY),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-W", "ignore", options.program, *arguments]
    return subprocess.run(command, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
