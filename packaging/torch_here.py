"""Prints the version of the PyTorch that this Python has, if Djinn can use it; nothing otherwise.

With the folder of a virtual environment as argument, lets that environment see the packages beside this PyTorch, below its own. The Makefile
uses both, so that no second PyTorch is installed.
"""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

OLDEST = (2, 11)


def usable() -> importlib.metadata.Distribution | None:
    """The PyTorch of this Python; None if there is none, if it is too old, or if it cannot be imported."""
    try:
        found = importlib.metadata.distribution("torch")
        numbers = tuple(int(part) for part in found.version.split(".")[:2])
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return None
    if sys.version_info < (3, 11) or numbers < OLDEST:
        return None
    imported = subprocess.run([sys.executable, "-c", "import torch"], check=False, capture_output=True)
    return found if imported.returncode == 0 else None


def main() -> None:
    torch = usable()
    if torch is None:
        return
    for environment in sys.argv[1:]:
        folder = Path(str(torch.locate_file(""))).resolve()
        (own,) = Path(environment).glob("lib/python3*/site-packages")
        (own / "torch_here.pth").write_text(f"import site; site.addsitedir({str(folder)!r})\n")
    print(torch.version)


if __name__ == "__main__":
    main()
