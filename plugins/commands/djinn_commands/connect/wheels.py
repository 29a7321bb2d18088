"""Wheels to send: Djinn and its plugins, built from the checkout or taken from a folder, and the folder's other wheels."""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final
from urllib.parse import unquote, urlsplit

import attrs

from djinn_commands.connect.ssh import Source
from djinn_core.registry.discovery import installed

if TYPE_CHECKING:
    from djinn.errors import ConfigurationError

# Packages that a server needs, and their folders in a checkout. They need not be installed locally.
_SERVER_PACKAGES: Final = {"djinn-server": "djinn_server", "djinn-tcp": "plugins/tcp"}
_BACKEND: Final = "hatchling.build"
_BUILD_SCRIPT: Final = "import os, sys\nfrom hatchling.build import build_wheel\nfor project in sys.argv[2:]:\n    os.chdir(project)\n    build_wheel(sys.argv[1])"


@attrs.frozen
class Wheels:
    """Wheel files to send.

    Attributes:
        files: local paths of the wheels.
        left_out: a message for each locally installed plugin that cannot be sent: its name and the reason.
    """

    files: tuple[Path, ...]
    left_out: tuple[str, ...] = ()

    def named(self, distribution: str) -> Path | None:
        """Return the path of a distribution's wheel, or None if it is missing."""
        prefix = f"{distribution.replace('-', '_')}-"
        return next((file for file in self.files if file.name.lower().startswith(prefix)), None)

    @property
    def own(self) -> tuple[Path, ...]:
        """Return the wheels of Djinn and its plugins."""
        return tuple(file for file in self.files if file.name.startswith(("djinn-", "djinn_")))

    def digests(self) -> dict[Path, str]:
        """Return the SHA-256 of each wheel, in hexadecimal."""
        return {file: _digest(file) for file in self.files}


def find_wheels(folder: Path | None, into: Path) -> Wheels:
    """Return the wheels of `folder` and pip's wheel. If `folder` is None or has no wheel of Djinn, add wheels built from the checkout.

    `into`: the folder for the built wheels.

    Raises:
        ConfigurationError: `folder` has a wheel of Djinn but lacks one of the server's packages. Or there is no wheel
            of Djinn, and the wheels cannot be built from a checkout.
    """
    wheels = tuple(sorted(folder.glob("*.whl"))) if folder is not None else ()
    if Wheels(wheels).named("djinn") is not None:
        if absent := [name for name in _SERVER_PACKAGES if Wheels(wheels).named(name) is None]:
            raise _configuration_error(
                f"{folder} has a wheel of Djinn and none of {' and '.join(absent)}, which the server there needs: add the wheels of the same "
                "release (`make dist` in a checkout builds them)"
            )
        return Wheels((*wheels, *_pip()))
    projects, left_out = _projects()
    if not any(project.name == "djinn" for project in projects):
        raise _configuration_error(
            "there is no wheel of Djinn to send, because Djinn is not installed from a checkout here: repeat the command with `--wheels DIR`, "
            "where DIR has the wheels of the release (`make dist` in a checkout builds them into dist/)"
        )
    command = [sys.executable, "-c", _BUILD_SCRIPT, str(into), *(str(project.folder) for project in projects)]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    if process.returncode:
        raise _configuration_error(
            f"the checkout's wheels cannot be built: fix the error, or name a folder of wheels with --wheels DIR. hatchling wrote:\n{process.stderr[-2000:]}"
        )
    return Wheels((*sorted(into.glob("*.whl")), *wheels, *_pip()), left_out)


def _configuration_error(text: str) -> ConfigurationError:
    from djinn.errors import ConfigurationError  # late: imports PyTorch, which only failures need

    return ConfigurationError(text)


@attrs.frozen
class _Project:
    name: str
    folder: Path


def _projects() -> tuple[list[_Project], tuple[str, ...]]:
    """Return the source folders of Djinn, its plugins and the server's packages, and why other plugins are left out."""
    projects, left_out = [], []
    names = {"djinn"} | {plugin.origin[0] for plugin in installed()}
    names -= _SERVER_PACKAGES.keys()
    for name in sorted(names):
        folder = _folder(metadata.distribution(name))
        if folder is None:
            left_out.append(f"{name}: it is not installed from a folder")
        elif _backend(folder) != _BACKEND:
            left_out.append(f"{name}: its wheel is built by {_backend(folder)}, not by {_BACKEND}")
        else:
            projects.append(_Project(name, folder))
            if name == "djinn":
                projects += (_Project(requirement, folder / place) for requirement, place in _SERVER_PACKAGES.items())
    return projects, tuple(left_out)


def _folder(distribution: metadata.Distribution) -> Path | None:
    text = distribution.read_text("direct_url.json")
    origin = json.loads(text) if text else {}
    if not origin.get("dir_info", {}).get("editable"):
        return None
    return Path(unquote(urlsplit(origin["url"]).path))


def _backend(folder: Path) -> str:
    try:
        table = tomllib.loads((folder / "pyproject.toml").read_text())
    except (OSError, tomllib.TOMLDecodeError):
        return "nothing"
    return str(table.get("build-system", {}).get("build-backend", "nothing"))


def _pip() -> tuple[Path, ...]:
    """Return the wheel of pip that the local Python bundles, for machines whose Python has no pip."""
    import ensurepip

    return tuple(sorted((Path(ensurepip.__file__).parent / "_bundled").glob("pip-*.whl")))[-1:]


def requirements(wheels: Wheels, torch: str) -> tuple[str, ...]:
    """Return pip's requirement lines for the remote environment: PyTorch, and the remote paths of Djinn's wheels."""
    return (torch, *(f"./wheels/{file.name}" for file in wheels.own))


def stamp_of(wheels: Wheels, torch: str) -> str:
    """Return a digest of Djinn's wheels and the requirement `torch`. It changes if the environment must be updated."""
    digests = sorted(f"{file.name} {_digest(file)}" for file in wheels.own)
    return hashlib.sha256("\n".join([torch, *digests]).encode()).hexdigest()[:16]


def missing_wheels(wheels: Wheels, listing: str) -> tuple[Path, ...]:
    """Return the wheels that the remote machine lacks. `listing`: the output of `have.sh`."""
    there = {name.strip(): digest for digest, _, name in (line.partition("  ") for line in listing.splitlines())}
    return tuple(file for file, digest in wheels.digests().items() if there.get(file.name) != digest)


def archive(files: Mapping[str, Path], texts: Mapping[str, str] | None = None) -> Source:
    """Return a source that writes a tar archive of `texts` (contents by name), then `files` (local paths by name).

    The last member is an empty file `whole`, because tar accepts an archive that is cut between two members.
    """

    def write(to: IO[bytes]) -> None:
        with tarfile.open(fileobj=to, mode="w|") as archived:
            for name, text in (texts or {}).items():
                content = text.encode()
                member = tarfile.TarInfo(name)
                member.size, member.mode = len(content), 0o600
                archived.addfile(member, io.BytesIO(content))
            for name, file in files.items():
                archived.add(file, name, recursive=False, filter=_without_owner)
            archived.addfile(tarfile.TarInfo("whole"))

    return write


def _without_owner(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Return the member with owner 0. Root's tar sets owners, which fails in a container that lacks the user."""
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


def total_bytes(files: Iterable[Path]) -> int:
    """Return the total bytes of the files."""
    return sum(file.stat().st_size for file in files)


def unpacked_bytes(files: Iterable[Path]) -> int:
    """Return the total bytes of the files inside wheels."""
    size = 0
    for file in files:
        with zipfile.ZipFile(file) as wheel:
            size += sum(entry.file_size for entry in wheel.infolist())
    return size


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
