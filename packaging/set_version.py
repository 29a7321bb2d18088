"""Set the version of all packages, and in documents and charts that name it.

    python packaging/set_version.py 26.12.0rc1

`packaging/build_release.py` refuses to build a commit whose tag names another version.
"""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from pathlib import Path

from packaging.version import InvalidVersion, Version

ROOT = Path(__file__).resolve().parents[1]
FILES = (
    "pyproject.toml",
    "djinn_*/pyproject.toml",
    "plugins/*/pyproject.toml",
    "djinn_*/__init__.py",
    "djinn_native/README.md",
    "docs/several-executors.md",
    "docs/site/versions.json",
    "RELEASING.md",
    "packaging/kubernetes/djinn/Chart.yaml",
    "packaging/kubernetes/kuberay.yaml",
)


def version_of(root: Path) -> str:
    """Return the version of the checkout at `root`."""
    return str(tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"])


def set_version(root: Path, new: str) -> int:
    """Replace the version of the checkout at `root` by `new`. Return the number of changed files."""
    old = re.compile(rf"(?<![\d.]){re.escape(version_of(root))}(?![\d.]*\d|(?:a|b|rc)\d)")
    changes = 0
    for file in [file for pattern in FILES for file in sorted(root.glob(pattern))]:
        text = file.read_text()
        if (changed_text := old.sub(new, text)) != text:
            file.write_text(changed_text)
            changes += 1
    return changes


def calendar_version(text: str) -> str:
    """Return a version in its normal form. Raise ValueError if it has not the form YEAR.MONTH.PATCH."""
    try:
        version = Version(text)
    except InvalidVersion as error:
        raise ValueError(f"{text!r} is not a version; write YEAR.MONTH.PATCH, such as 26.12.0 or 26.12.0rc1") from error
    if len(version.release) != 3 or not 26 <= version.major <= 99 or not 1 <= version.minor <= 12 or version.local:
        raise ValueError(f"{text!r} is not a calendar version; write YEAR.MONTH.PATCH, such as 26.12.0 or 26.12.0rc1")
    return str(version)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version")
    parser.add_argument("--root", type=Path, default=ROOT, help="another checkout")
    options = parser.parse_args()
    version = calendar_version(options.version)
    print(f"{set_version(options.root.resolve(), version)} files say {version} now")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ValueError as error:
        sys.exit(str(error))
