"""Virtual environments on top of the current one, for large packages."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import attrs

from evaluation import ROOT

LOCK = ROOT / "requirements-dev.lock"


@attrs.frozen
class Layer:
    """An environment layered on the current one.

    Attributes:
        name: suffix of its folder: `.venv-ray` beside `.venv`.
        packages: arguments of pip, in the root of the checkout.
        locked: True to use versions of the lock file, if it was made for this PyTorch.
    """

    name: str
    packages: tuple[str, ...]
    locked: bool = False

    def python(self) -> str:
        """Return the interpreter of the environment. Make or update the environment if its packages have changed."""
        folder = Path(f"{sys.prefix}-{self.name}")
        interpreter, stamp = folder / "bin" / "python", folder / "ready.txt"
        command = [str(interpreter), "-m", "pip", "--disable-pip-version-check", "install", *self._constraints()]
        command += ["--no-build-isolation", *self.packages]
        required = "\n".join([*command, *(file.read_text() for file in self._manifests())])
        if stamp.exists() and stamp.read_text() == required:
            return str(interpreter)
        stamp.unlink(missing_ok=True)
        venv.create(folder, symlinks=True)
        below = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
        Path(sysconfig.get_path("purelib", "venv", {"base": str(folder)}), "below.pth").write_text(below)
        subprocess.run(command, cwd=ROOT, check=True)
        stamp.write_text(required)
        return str(interpreter)

    def _constraints(self) -> list[str]:
        constraints = Path(sys.prefix, "torch-constraints.txt")  # the build of PyTorch, as written by the Makefile
        files = [constraints] if constraints.exists() else []
        return [
            part for file in (*files, *([LOCK] if self.locked and _is_locked() else [])) for part in ("-c", str(file))
        ]

    def _manifests(self) -> list[Path]:
        return [ROOT / name.partition("[")[0] / "pyproject.toml" for name in self.packages if name.startswith(".")]


def _is_locked() -> bool:
    """Return True if the lock file was made for the installed PyTorch, which its first line names."""
    version = re.search(r"PyTorch (\d+\.\d+\.\d+)", LOCK.read_text().partition("\n")[0])
    return version is not None and importlib.metadata.version("torch").startswith(version[1])


def torch_requirement() -> str:
    """Return a requirement of the installed PyTorch for an environment that does not include it.

    The Makefile writes the requirement and the installed version into the folder of the environment.
    """
    result, inputs = Path(sys.prefix, "torch.here"), Path(sys.prefix, "torch.wanted")
    if inputs.exists() and not (result.exists() and result.read_text().strip()):
        return inputs.read_text().strip()
    return f"torch=={importlib.metadata.version('torch').partition('+')[0]}"
