"""Tests of clients without Linux-only features, as on macOS and Windows. They have never run on real macOS or Windows.

python -m evaluation simulated                     # a short part of both; CI runs it
python -m evaluation simulated darwin [TESTS]      # a large part of the suite, as on a Mac
python -m evaluation simulated windows [tcps|https TESTS]   # tests of clients with a server
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent
# the client, the device, and a local executor
DARWIN = (
    *(f"tests/{name}" for name in "interception runtime protocol system wire ir models".split()),
    *(f"plugins/{name}" for name in "http tcp ucx costs".split()),
)
WINDOWS = ("tests/interception",)
# tests of processes, threads, sockets, files and errors
DARWIN_SHORT = (
    "tests/protocol",
    "tests/system/test_native_stack.py",
    *(f"tests/interception/test_{name}.py" for name in "device_module device_processes threads".split()),
)
WINDOWS_SHORT = tuple(
    f"tests/interception/test_{name}.py"
    for name in (
        "async_fetch device_module device_processes errors moving numeric_settings reference_counts tensor_storage threads tracebacks "
        "waits"
    ).split()
)


def darwin(tests: Sequence[str]) -> int:
    """Run tests in a process that simulates macOS."""
    environment = os.environ | {"SIMULATED_PLATFORM": "darwin", "PYTHONPATH": str(HERE)}
    return subprocess.run([sys.executable, "-m", "pytest", *tests], env=environment, check=False).returncode


def windows(arguments: Sequence[str]) -> int:
    """Run tests in a process that simulates Windows."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "evaluation.simulated.run_windows", *arguments]
    return subprocess.run(command, env=environment, check=False).returncode


def main() -> int:
    """Run the short tests of both platforms, or the tests of the platform that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("platform", nargs="?", choices=("darwin", "windows"))
    options, arguments = parser.parse_known_args()
    if options.platform == "darwin":
        return darwin(arguments or DARWIN)
    if options.platform == "windows":
        return windows(arguments or ["tcps", *WINDOWS])
    return darwin(DARWIN_SHORT) or windows(["tcps", *WINDOWS_SHORT])


if __name__ == "__main__":
    sys.exit(main())
