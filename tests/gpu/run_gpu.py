"""Everything that needs a GPU, from a checkout on a machine where nothing is installed but PyTorch, without a network:

    python tests/gpu/run_gpu.py --quick --out FOLDER

ends in three minutes and runs the parts of `make test-gpu` that need little. FOLDER/report.md begins with a summary: broken, slow, fine, not run.
The parts of executors come first, and need no compiler. The others need the client's device: it is compiled if there is a compiler and a PyTorch
that it is written for, and otherwise these parts are not run.

Python packages that the machine lacks come from a folder of wheels, a few megabytes, which is made where there is a network:

    python tests/gpu/run_gpu.py --print-requirements > requirements.txt
    python -m pip download --only-binary=:all: --python-version 3.12 -d .wheels -r requirements.txt

and is found beside the checkout's files, or named by --wheels. The environment of the machine is left as it is: packages are unpacked into a
temporary folder. Other options are those of `python -m evaluation gpu`. `--device fakegpu` and `--device cpu` try it without a GPU.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROJECTS = [
    ROOT / name for name in (".", "djinn_server", "djinn_native", "plugins/tcp", "plugins/cuda", "plugins/fakegpu")
]
GIVEN = ("torch", "numpy", "setuptools")  # a machine with PyTorch has them


def project(folder: Path) -> dict:
    return tomllib.loads((folder / "pyproject.toml").read_text())["project"]


def requirements() -> dict[str, str]:
    """Return the requirements of Djinn and its plugins by name, without Djinn's own packages."""
    found = {}
    for folder in PROJECTS:
        for requirement in project(folder).get("dependencies", ()):
            name = re.match(r"[\w.-]+", requirement)[0].lower()
            if not name.startswith("djinn") and name not in GIVEN:
                found[name] = requirement
    return found


def is_installed(name: str) -> bool:
    try:
        return bool(importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return False


def unpack(wheels: Path, site: Path) -> None:
    """Unpack missing packages with pip, and write Djinn's metadata, which names its plugins."""
    missing = [requirement for name, requirement in requirements().items() if not is_installed(name)]
    if missing:
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "-q",
            "--no-index",
            "--no-compile",
            "--disable-pip-version-check",
        ]
        subprocess.run([*command, "--find-links", wheels, "--target", site, *missing], check=True)
    for folder in PROJECTS:
        table = project(folder)
        info = site / f"{table['name'].replace('-', '_')}-{table['version']}.dist-info"
        info.mkdir(parents=True)
        required = [f"Requires-Dist: {requirement}\n" for requirement in table.get("dependencies", ())]
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {table['name']}\nVersion: {table['version']}\n" + "".join(required)
        )
        groups = {"console_scripts": table.get("scripts", {}), **table.get("entry-points", {})}
        lines = [
            f"[{group}]\n" + "".join(f"{name} = {at}\n" for name, at in entries.items())
            for group, entries in groups.items()
        ]
        (info / "entry_points.txt").write_text("".join(lines))


def main() -> int:
    arguments = sys.argv[1:]
    if "--print-requirements" in arguments:
        print(*requirements().values(), sep="\n")
        return 0
    if {"-h", "--help"} & {*arguments}:
        print(__doc__)
    wheels = ROOT / ".wheels"
    if "--wheels" in arguments:
        at = arguments.index("--wheels")
        wheels = Path(arguments[at + 1])
        del arguments[at : at + 2]
    with tempfile.TemporaryDirectory() as site:
        environment = dict(os.environ)
        if not is_installed("djinn"):
            unpack(wheels, Path(site))
            folders = [site, ROOT, *PROJECTS[3:], os.environ.get("PYTHONPATH", "")]
            environment["PYTHONPATH"] = os.pathsep.join(str(folder) for folder in folders if folder)
        return subprocess.run(
            [sys.executable, "-W", "ignore", "-m", "evaluation.gpu.run_gpu", *arguments],
            check=False,
            cwd=ROOT,
            env=environment,
        ).returncode


if __name__ == "__main__":
    sys.exit(main())
