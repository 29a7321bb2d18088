"""Build the release into a folder: a wheel and a source distribution of every package, checked, with their digests.

Every package is built twice: as for a release (the wheel from the source distribution), and from a copy of the tracked files in another
folder with other permissions. Both builds must give the same bytes.

The script runs in an environment with the extra `release` of pyproject.toml (`make dist`). Another Python, which has PyTorch, compiles
djinn-native: one wheel for this machine. cibuildwheel makes the wheels of other platforms (djinn_native/README.md).
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from commands import StepError, run
from set_version import version_of

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = [
    ".",
    "djinn_server",
    *sorted(str(path.parent.relative_to(ROOT)) for path in ROOT.glob("plugins/*/pyproject.toml")),
]
NATIVE = "djinn_native"
DIGESTS = "SHA256SUMS"
# What lies at the top of a wheel: a package of the wheel's name, except here.
TOP_LEVEL = {"djinn": "djinn,djinn_core,djinn_client"}


def epoch() -> str:
    """Return the modification time of files in the packages, in seconds since 1970.

    It is `SOURCE_DATE_EPOCH` if set, else the time of the last commit, or 1 January 2026 outside a checkout.
    """
    result = subprocess.run(
        ["git", "-C", ROOT, "log", "-1", "--format=%ct"], check=False, capture_output=True, text=True
    )
    return os.environ.get("SOURCE_DATE_EPOCH") or result.stdout.strip() or "1767225600"


def check_tag(root: Path) -> None:
    """Raise StepError if the commit has a version tag that differs from the version of the packages."""
    command = ["git", "-C", root, "tag", "--points-at", "HEAD", "--list", "v[0-9]*"]
    tags = subprocess.run(command, check=False, capture_output=True, text=True).stdout.split()
    version = version_of(root)
    if tags and f"v{version}" not in tags:
        raise StepError(
            f"this commit has the tag {', '.join(tags)}, and its packages have the version {version}: set the version "
            "with `python packaging/set_version.py VERSION`, commit, and tag that commit"
        )


def copy_sources(to: Path) -> Path:
    """Copy the files that git does not ignore to the folder `to`, and return it. Outside a checkout, copy all files."""
    command = ["git", "-C", ROOT, "ls-files", "--cached", "--others", "--exclude-standard"]
    result = subprocess.run(command, check=False, capture_output=True, text=True)
    if result.returncode:
        return Path(shutil.copytree(ROOT, to, ignore=shutil.ignore_patterns(".venv*", "dist", "build")))
    for name in result.stdout.splitlines():
        if (ROOT / name).is_file():  # not one that was removed and not committed
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, to / name)
    return to


def build(source: Path, to: Path, *options: str, umask: int = -1) -> None:
    """Build all packages of the checkout `source` into the folder `to`.

    `options`: of `python -m build`. Without options, it builds source distributions, and wheels from these.
    """

    def build_package(package: str) -> None:
        command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", to, *options, source / package]
        run(*command, umask=umask, PYTHONPATH="")

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        list(threads.map(build_package, PACKAGES))


def build_native(python: Path, source: Path, to: Path, umask: int = -1) -> None:
    """Build the source distribution of djinn-native and its wheel into the folder `to`.

    If `source` is the checkout, the wheel is built from the source distribution, otherwise from `source`.
    """
    command = [sys.executable, "-m", "build", "--no-isolation", "--skip-dependency-check", "--sdist", "--outdir", to]
    run(*command, source / NATIVE, umask=umask)
    (archive,) = to.glob(f"{NATIVE}-*.tar.gz")
    normalize(archive)
    wheel = [python, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-cache-dir", "--wheel-dir", to]
    run(*wheel, archive if source == ROOT else source / NATIVE, umask=umask, PYTHONPATH="")


def normalize(archive: Path) -> None:
    """Pack a source distribution again with fixed times, modes and user, which differ between machines in setuptools' archives."""
    buffer = io.BytesIO()
    with tarfile.open(archive) as old, tarfile.open(fileobj=buffer, mode="w") as new:
        for member in sorted(old.getmembers(), key=lambda member: member.name):
            clean = tarfile.TarInfo(member.name)
            clean.type, clean.size, clean.mtime = member.type, member.size, int(os.environ["SOURCE_DATE_EPOCH"])
            clean.mode = 0o755 if member.isdir() else 0o644
            new.addfile(clean, old.extractfile(member))
    archive.write_bytes(gzip.compress(buffer.getvalue(), mtime=int(os.environ["SOURCE_DATE_EPOCH"])))


def differing(first: Path, second: Path) -> Iterator[str]:
    """Yield the names of files that are in only one of two folders, or whose bytes differ."""
    names = {path.name for folder in (first, second) for path in folder.iterdir()}
    for name in sorted(names):
        files = [folder / name for folder in (first, second)]
        if not all(file.exists() for file in files) or len({file.read_bytes() for file in files}) > 1:
            yield name


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--to", type=Path, default=ROOT / "dist", help="folder of the release, which is emptied first")
    parser.add_argument("--native-python", type=Path, required=True, help="Python with PyTorch, setuptools and ninja")
    options = parser.parse_args()
    check_tag(ROOT)
    to, native = options.to.resolve(), options.native_python.absolute()
    os.environ["SOURCE_DATE_EPOCH"] = epoch()  # once: a commit in the meantime changes nothing
    shutil.rmtree(to, ignore_errors=True)
    build(ROOT, to)
    build_native(native, ROOT, to)
    with tempfile.TemporaryDirectory() as folder:
        again = Path(folder, "again")
        copy = copy_sources(Path(folder, "copy"))
        build(copy, again, "--sdist", "--wheel", umask=0o077)
        build_native(native, copy, again, umask=0o077)
        if results := [*differing(to, again)]:
            raise StepError(f"two builds of these files differ: {', '.join(results)}")
    wheels, sources = sorted(to.glob("*.whl")), sorted(to.glob("*.tar.gz"))
    if not len(wheels) == len(sources) == len(PACKAGES) + 1:
        raise StepError(
            f"each of {len(PACKAGES) + 1} packages must give a wheel and a source distribution, but {to} has {len(wheels)} and {len(sources)}"
        )
    run(sys.executable, "-m", "twine", "check", "--strict", *wheels, *sources)
    for wheel in wheels:
        package = wheel.name.partition("-")[0]
        contents = TOP_LEVEL.get(package, package)
        run(sys.executable, "-m", "check_wheel_contents", "--no-config", "--toplevel", contents, wheel)
    lines = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in (*sources, *wheels)]
    (to / DIGESTS).write_text("".join(lines))
    print(
        f"{to.name} has {len(wheels)} wheels and {len(sources)} source distributions. Two builds gave the same bytes. {DIGESTS} has the digests"
    )
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except StepError as error:
        sys.exit(str(error))
