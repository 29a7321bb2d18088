"""The files of a project that are sent with a job: not what `.gitignore` leaves out, not what can be made again, and no secrets."""

from __future__ import annotations

import os
import stat
import tomllib
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Final

import attrs
import pathspec

# Made by tools, for this machine alone. A folder with `pyvenv.cfg` is an environment, whatever its name.
_MADE: Final = frozenset(
    ".git .hg .svn .jj __pycache__ .mypy_cache .ruff_cache .pytest_cache .ipynb_checkpoints .tox .nox .hypothesis node_modules .venv".split()
)
SECRETS: Final = (
    ".env .env.* *.env *.pem *.key *.p12 *.pfx *.jks *.keystore *.kdbx *.ppk *.gpg *.asc id_rsa* id_dsa* id_ecdsa* id_ed25519* .netrc _netrc "
    ".pypirc .npmrc .git-credentials .pgpass .htpasswd credentials credentials.* *credentials*.json *service-account*.json "
    "*service_account*.json client_secret*.json secrets.* *.secret *.token token token.txt tokens.json .ssh .aws .azure .gnupg .kube .docker "
    ".vault-token terraform.tfstate*"
).split()
_HARMLESS: Final = (".env.example", ".env.sample", ".env.template", "*.pub")
_LARGEST_COUNT: Final = 20_000


@attrs.frozen
class ProjectFiles:
    """Files of a project that are sent, and those that are not.

    Attributes:
        root: the folder. files: relative paths, in order, with sizes. secrets: paths that look like secrets. links: those that lead out of
            the folder. ignored: how many entries `.gitignore` leaves out.
    """

    root: Path
    files: dict[str, int]
    secrets: tuple[str, ...] = ()
    links: tuple[str, ...] = ()
    ignored: int = 0

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(self.files.values())

    def largest(self, count: int = 5) -> list[tuple[str, int]]:
        """The largest files, with their sizes."""
        return sorted(self.files.items(), key=lambda item: -item[1])[:count]


def is_secret(name: str) -> bool:
    """True if files of that name usually hold keys, passwords or tokens."""
    lower = name.lower()
    if any(fnmatch(lower, pattern) for pattern in _HARMLESS):
        return False
    return any(fnmatch(lower, pattern) for pattern in SECRETS)


def find_files(root: Path, included: Sequence[str] = ()) -> ProjectFiles:
    """The files of the folder `root` that are sent. `included`: patterns as in `.gitignore` of what is sent in any case."""
    chosen = pathspec.GitIgnoreSpec.from_lines(included)
    files: dict[str, int] = {}
    secrets: list[str] = []
    links: list[str] = []
    ignored = 0
    for path, name, is_ignored in _walk(root, chosen):
        if chosen.match_file(path):
            pass
        elif is_secret(name):
            secrets.append(path)
            continue
        elif is_ignored:
            ignored += 1
            continue
        status = (root / path).lstat()
        if stat.S_ISLNK(status.st_mode) and not (root / path).resolve().is_relative_to(root.resolve()):
            links.append(path)
        elif stat.S_ISREG(status.st_mode) or stat.S_ISLNK(status.st_mode):
            files[path] = status.st_size
    return ProjectFiles(root, files, tuple(secrets), tuple(links), ignored)


def _walk(root: Path, chosen: pathspec.GitIgnoreSpec) -> Iterator[tuple[str, str, bool]]:
    """Relative path and name of each file, and of each folder that is left out as a whole, and if `.gitignore` leaves it out."""
    rules: dict[str, pathspec.GitIgnoreSpec] = {}
    for folder, names, found in os.walk(root):
        here = Path(folder).relative_to(root).as_posix()
        prefix = "" if here == "." else f"{here}/"
        if ".gitignore" in found and Path(folder, ".gitignore").is_file():
            text = Path(folder, ".gitignore").read_text(errors="replace")
            rules[prefix] = pathspec.GitIgnoreSpec.from_lines(text.splitlines())
        entered = []
        for name in sorted(names):
            path = f"{prefix}{name}"
            if name in _MADE or Path(folder, name, "pyvenv.cfg").exists():
                continue
            if Path(folder, name).is_symlink():
                yield path, name, _ignored(f"{path}/", rules)
            elif is_secret(name) or (_ignored(f"{path}/", rules) and not _may_hold(path, chosen)):
                yield path, name, True
            else:
                entered.append(name)
        names[:] = entered
        for name in sorted(found):
            path = f"{prefix}{name}"
            if name not in _MADE and not name.endswith((".pyc", ".pyo")):
                yield path, name, _ignored(path, rules)


def _ignored(path: str, rules: dict[str, pathspec.GitIgnoreSpec]) -> bool:
    """True if the last `.gitignore` that says anything about a path says so: those of inner folders come after those of outer ones."""
    said = False
    for prefix in sorted(rules, key=len):
        if path.startswith(prefix):
            found = rules[prefix].check_file(path[len(prefix) :]).include
            said = said if found is None else found
    return said


def _may_hold(folder: str, chosen: pathspec.GitIgnoreSpec) -> bool:
    """True if something below a folder may be asked for."""
    return any(str(getattr(one, "pattern", "")).lstrip("/").startswith(f"{folder}/") for one in chosen.patterns)


def objection(found: ProjectFiles, limit: int) -> str:
    """The reason why these files are not sent, and what to do; empty if they can be."""
    home = Path.home().resolve()
    root = found.root.resolve()
    if root == home or root in home.parents:
        return f"{root} is no project but has all your files: change to the project's folder, or name it with --project"
    if found.size <= limit and len(found.files) <= _LARGEST_COUNT:
        return ""
    largest = "\n".join(f"    {size / (1 << 20):8.1f} MiB  {path}" for path, size in found.largest())
    return (
        f"{root} has {len(found.files):,} files of {found.size / (1 << 20):.1f} MiB to send, more than {limit / (1 << 20):.0f} MiB or {_LARGEST_COUNT:,} "
        f"files. Leave out what the job does not need in .gitignore, or allow more with --limit-mib. The largest:\n{largest}"
    )


def project_requirements(root: Path) -> tuple[str, ...]:
    """Requirements of a project, a line each: of `requirements.txt`, or else the dependencies in `pyproject.toml`.

    Raises:
        ValueError: the file cannot be read.
    """
    listed = root / "requirements.txt"
    if listed.is_file():
        lines = [line.strip() for line in listed.read_text().splitlines()]
        return tuple(line for line in lines if line and not line.startswith("#"))
    table = root / "pyproject.toml"
    if not table.is_file():
        return ()
    try:
        project = tomllib.loads(table.read_text()).get("project", {})
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{table}: {error}") from error
    return tuple(str(one) for one in project.get("dependencies", ()))
