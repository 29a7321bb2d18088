"""Print the version of this Python's PyTorch if Djinn can use it, otherwise nothing.

If the argument is the folder of a virtual environment, let this environment import the packages of this Python as well. Its own packages come
first. The Makefile uses both, so that no second PyTorch is installed.
"""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1] / "djinn_native" / "pyproject.toml"


def usable() -> importlib.metadata.Distribution | None:
    """Return the PyTorch of this Python, or None if it is missing, of an unsupported version, or cannot be imported."""
    try:
        result = importlib.metadata.distribution("torch")
    except importlib.metadata.PackageNotFoundError:
        return None
    try:
        import tomllib
    except ImportError:  # Python 3.10, of which the Makefile says that it is too old
        return None
    minors = tomllib.loads(PROJECT.read_text())["tool"]["djinn-native"]["torch-minors"]
    if ".".join(result.version.split(".")[:2]) not in minors:
        return None
    imported = subprocess.run([sys.executable, "-c", "import torch"], check=False, capture_output=True)
    return result if imported.returncode == 0 else None


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
