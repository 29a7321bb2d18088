"""Rename the project in distributions, imports, commands, settings, metrics, documents, files and folders.

    python packaging/rename.py NEW-NAME

The name is a word of lower-case letters and digits, because Python imports packages by this name. `djinn` becomes the new name, `Djinn` the
name with a capital, and `DJINN` the name in capitals, also inside longer words. The first bytes of a frame or a journal (`DJNF`, `DJNJ`)
stay, because users do not see them. `ruff` sorts imports again.

The checkout must have no uncommitted changes. Afterwards, run `make venv test`, and look at `git diff`.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path

from commands import StepError, run

ROOT = Path(__file__).resolve().parents[1]
OLD = "djinn"
NAME = re.compile(r"[a-z][a-z0-9]{1,30}")


def renamed(text: str, name: str, old: str = OLD) -> str:
    """Return `text` with `name` instead of the name `old`, in lower case, with a capital and in capitals."""
    pairs = {old: name, old.capitalize(): name.capitalize(), old.upper(): name.upper()}
    return re.sub("|".join(pairs), lambda match: pairs[match[0]], text)


def tracked(root: Path) -> list[str]:
    """Return the paths of the files that git tracks, relative to `root`."""
    return [name for name in run("git", "-C", root, "ls-files", "-z").split("\0") if name]


def rename(root: Path, name: str) -> int:
    """Rename the project in the checkout at `root`. Return the number of changed files."""
    changes = 0
    for old_path in tracked(root):
        source, new_path = root / old_path, renamed(old_path, name)
        if source.is_symlink() or not source.is_file():
            continue
        content = source.read_bytes()
        try:
            new_content = renamed(content.decode(), name).encode()
        except UnicodeDecodeError:  # a picture, or an archive
            new_content = content
        if new_content != content:
            source.write_bytes(new_content)
        if new_path != old_path:
            (root / new_path).parent.mkdir(parents=True, exist_ok=True)
            source.rename(root / new_path)
            remove_empty(source.parent)
        changes += new_content != content or new_path != old_path
    run("git", "-C", root, "add", "--all")
    return changes


def remove_empty(folder: Path) -> None:
    """Remove a folder and its parents if they hold only bytecode, because Python would import them as namespace packages."""
    while not {path.name for path in folder.iterdir()} - {"__pycache__"}:
        shutil.rmtree(folder)
        folder = folder.parent


def sort_again(root: Path) -> None:
    """Sort imports and wrap lines again, because the new name has another length and first letter."""
    ruff = [sys.executable, "-m", "ruff"]
    run(*ruff, "check", "--quiet", "--fix", "--exit-zero", "--select", "I,RUF022", ".", cwd=root)
    run(*ruff, "format", "--quiet", ".", cwd=root)
    run("git", "-C", root, "add", "--all")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="the new name")
    parser.add_argument("--root", type=Path, default=ROOT, help="another checkout")
    options = parser.parse_args()
    root: Path = options.root.resolve()
    if not NAME.fullmatch(options.name) or OLD in options.name:
        raise StepError(f"{options.name!r} is no name: one word of lower-case letters and digits, without {OLD!r}")
    if run("git", "-C", root, "status", "--porcelain", "--untracked-files=no").strip():
        raise StepError(
            "the checkout has uncommitted changes: commit them first, so that `git diff` shows only the renaming"
        )
    changes = rename(root, options.name)
    sort_again(root)
    print(
        f"{changes} files say {options.name} now. Next: make venv test, and read again what they say of the old name on the index:"
    )
    print(run("git", "-C", root, "grep", "-n", "-i", "-E", "public (package )?index|PyPI", "--", "*.md"), end="")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (StepError, subprocess.SubprocessError) as error:
        sys.exit(str(error))
