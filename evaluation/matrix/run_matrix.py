"""The test suite on each available version of Python, with reasons for versions that are missing.

A version is available if `python3.X` starts, on the search path or below `--roots` (unpacked Debian roots:
`usr/bin/python3.X`, used with chroot). Each gets an environment in build/matrix, with the same PyTorch if its index has
a build. Without a build, only the checks that need no PyTorch run: reference counts and the native stack.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from evaluation import ROOT
from evaluation.environments import torch_requirement

BUILD = ROOT / "build" / "matrix"
VERSIONS = ("3.11", "3.12", "3.13", "3.13t", "3.14", "3.14t")
WITHOUT_TORCH = Path(__file__).with_name("without_torch.py")
PLUGINS = sorted(path.parent for path in ROOT.glob("plugins/*/pyproject.toml"))
HOUR = 3600


def interpreter_path(version: str) -> str | None:
    """Return the path of Python `version`, or None if it is missing or does not start, such as a version manager's shim."""
    for folder in os.get_exec_path():
        path = Path(folder) / f"python{version}"
        if path.exists():
            process = subprocess.run(
                [path, "-c", "import sys; print(sys.executable)"], capture_output=True, text=True, check=False
            )
            if process.returncode == 0:
                return process.stdout.strip()
    managed = sorted(
        Path.home().glob(f".pyenv/versions/{version.rstrip('t')}*{'t' if version.endswith('t') else ''}/bin/python3")
    )
    return str(managed[-1]) if managed else None


def step(command: list[object], log: Path, **options: object) -> bool:
    """Run a command with its output appended to a log. Return True on success."""
    with log.open("ab") as output:
        output.write(f"\n$ {' '.join(map(str, command))}\n".encode())
        output.flush()
        process = subprocess.run(
            [*map(str, command)], stdout=output, stderr=output, cwd=ROOT, check=False, timeout=2 * HOUR, **options
        )
    return process.returncode == 0


def prepare_environment(python: str, version: str, torch: str, log: Path) -> tuple[Path, str]:
    """Return the interpreter of an environment with Djinn, and the reason why it lacks PyTorch, or ""."""
    folder = BUILD / f"venv-{version}"
    own = folder / "bin" / "python"
    if not own.exists() and not step([python, "-m", "venv", folder], log):
        shutil.rmtree(folder, ignore_errors=True)
        return Path(python), "no virtual environment can be made"
    pip = [own, "-m", "pip", "--disable-pip-version-check", "install"]
    if not step([*pip, torch], log):
        return own, f"{torch} does not install"
    lock = ["-c", ROOT / "requirements-dev.lock"] if (ROOT / "requirements-dev.lock").exists() else []
    packages = [part for plugin in PLUGINS for part in ("-e", plugin)]
    building = ["hatchling>=1.24", "editables>=0.5", "setuptools>=77", "ninja>=1.11"]
    own_packages = ["-e", ".[test]", "-e", "./djinn_server", "-e", "./djinn_native", *packages]
    required = [building, ["--no-build-isolation", *own_packages]]
    for packages in required:
        if not step([*pip, *lock, *packages], log) and not step([*pip, *packages], log):
            return own, "the requirements of the tests cannot be installed"
    return own, ""


def run_tests(version: str, torch: str, tests: list[str]) -> dict[str, object]:
    """Return one row: the tests that ran, the result, and the log file."""
    python = interpreter_path(version)
    if python is None:
        return {"python": version, "result": "not run", "why": f"python{version} is not installed"}
    log = BUILD / f"{version}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text("")
    start = time.monotonic()
    own, lacking = prepare_environment(python, version, torch, log)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    if lacking:
        good = step([own, WITHOUT_TORCH], log, env=environment | {"PYTHONPATH": str(ROOT)})
        ran = "what needs no PyTorch"
    else:
        whole = ["--numprocesses=2", "--dist=loadfile", "--no-loadscope-reorder"]
        good = step([own, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(tests or whole)], log, env=environment)
        ran = " ".join(tests) or "the whole suite"
    last = next((line for line in reversed(log.read_text(errors="replace").splitlines()) if line.strip()), "")
    row = {
        "python": version,
        "result": "passed" if good else "FAILED",
        "ran": ran,
        "said": last,
        "log": str(log.relative_to(ROOT)),
    }
    return row | {"seconds": round(time.monotonic() - start)} | ({"why": lacking} if lacking else {})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--torch", default=torch_requirement(), help="requirement of PyTorch")
    parser.add_argument(
        "--only", action="append", choices=VERSIONS, help="run this version; the option can be repeated"
    )
    parser.add_argument("--tests", nargs="*", default=[], help="run only these tests, not the whole suite")
    parser.add_argument("--json", type=Path, help="write the rows to a file")
    options = parser.parse_args()
    rows = []
    for version in options.only or VERSIONS:
        rows.append(run_tests(version, options.torch, options.tests))
        print(
            " ".join(
                f"{value}" if name in {"python", "result"} else f"{name}={value!r}" for name, value in rows[-1].items()
            ),
            flush=True,
        )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")
    return 1 if any(row["result"] == "FAILED" for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
