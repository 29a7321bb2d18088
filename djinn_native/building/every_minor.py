"""Build a library for each supported PyTorch into `lib/`. The wheel then contains all of them.

cibuildwheel runs this before each wheel in a separate environment, because it replaces the environment's PyTorch.
`TORCH_INDEX` is the index of CPU builds that PyTorch's installation page names. Without it, Linux gets CUDA builds: the
same headers, and gigabytes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]


def main() -> None:
    """Build all libraries, one after the other."""
    table = tomllib.loads((PROJECT / "pyproject.toml").read_text())
    pip = [sys.executable, "-m", "pip", "install"]
    index = os.environ.get("TORCH_INDEX", "")
    subprocess.run([*pip, *table["build-system"]["requires"]], check=True)
    for minor in table["tool"]["djinn-native"]["torch-minors"]:
        subprocess.run([*pip, *(["--index-url", index] if index else []), f"torch=={minor}.*"], check=True)
        subprocess.run([sys.executable, "setup.py", "build_ext", "--inplace"], cwd=PROJECT, check=True)


if __name__ == "__main__":
    main()
