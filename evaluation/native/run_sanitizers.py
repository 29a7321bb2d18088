"""The C++ of djinn_native and of the server's replay under address and undefined behaviour sanitizers; needs gcc.

Random programs test the client's library, and the replay's tests with random templates the server's.

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
SANITIZERS = {"DJINN_NATIVE_SANITIZE": "address,undefined"}
REPLAY_TESTS = (
    "-m",
    "pytest",
    "-q",
    "-p",
    "no:cacheprovider",
    "tests/server/test_native_replay.py",
    "tests/server/test_growing.py",
)


def build() -> None:
    """Compile a copy of the package with a separate library."""
    environment = {"MAX_JOBS": "2"} | os.environ | SANITIZERS
    command = [sys.executable, "setup.py", "--quiet", "build", "--build-lib", str(LIBRARY)]
    subprocess.run(command, cwd=ROOT / "djinn_native", env=environment, check=True)
    subprocess.run([sys.executable, "-m", "djinn_server.running.native_replay"], env=environment, check=True)


def _library(name: str) -> str:
    command = ["c++", f"-print-file-name={name}"]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


def main() -> int:
    """Build, and run a program with it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", help="program to run instead of random programs and tests of the replay")
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
    programs: list[tuple[str, ...]] = [(options.program or "evaluation/native/random_programs.py", *arguments)]
    if options.program is None:
        programs.append(REPLAY_TESTS)
        environment |= SANITIZERS
    return max(
        subprocess.run([sys.executable, "-W", "ignore", *program], cwd=ROOT, env=environment, check=False).returncode
        for program in programs
    )


if __name__ == "__main__":
    sys.exit(main())
