"""The weight source `hf:`: read Hugging Face caches on the server's disk, and download permitted models."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from huggingface_hub.constants import HF_HUB_CACHE

from djinn.errors import WeightsUnavailable
from djinn.hooks import LocalPlace, ReportDownload, WeightFile, WeightPermissions, WeightSource, hookimpl
from djinn_server.builtins.weights import open_folder
from djinn_weights.hub.downloads import Downloads, is_whole, repository_in

djinn_api_version = "2.0"

_SEGMENT: Final = re.compile(r"(?!\.{1,2}$)[^\x00-\x1f\x7f/\\%@:?#]+")  # part of a revision or path, not `.` or `..`


class HubSource(WeightSource):
    """Read `hf://organisation/model@revision/file` from caches in permitted folders, and from the server's own cache.

    If no cache has a permitted model, it is downloaded into the server's own cache.
    """

    name = "hf"

    def __init__(self, own_cache: Path | None = None, endpoint: str | None = None) -> None:
        """`own_cache`: cache of the server's user. `endpoint`: address of the hub.

        None: the defaults of huggingface_hub.
        """
        self._own = own_cache or Path(HF_HUB_CACHE)
        self._downloads = Downloads(self._own, endpoint)

    def places(self, address: str, folders: Sequence[Path]) -> Sequence[LocalPlace | str]:
        """Return the address, then the folders. `download` uses a cache only if it has the complete model."""
        name, revision, path = parse(address)
        caches = [repository_in(cache, name) for cache in self._caches(folders)]
        return [address, *(LocalPlace(_snapshot(folder, revision, path), immutable=True) for folder in caches)]

    def download(self, address: str, permissions: WeightPermissions, report: ReportDownload) -> Sequence[WeightFile]:
        """Open a network address, and report the progress of the download."""
        name, revision, path = parse(address)
        for cache in self._caches(permissions.folders):
            cached_path = self._cached(cache, name, revision, path, permissions)
            if cached_path and is_whole(cached_path):
                return cached_path
        try:
            return self._downloads.open(name, revision, path, permissions.suffixes, report)
        except WeightsUnavailable:
            # a cached copy, if the hub does not answer
            repository = repository_in(self._own, name)
            own = WeightPermissions((repository,), suffixes=permissions.suffixes)
            cached_path = self._cached(self._own, name, revision, path, own)
            if cached_path and is_whole(cached_path):
                return cached_path
            raise

    def _caches(self, folders: Sequence[Path]) -> Sequence[Path]:
        return list(dict.fromkeys((*folders, self._own)))

    @staticmethod
    def _cached(
        cache: Path, name: str, revision: str, path: str, permissions: WeightPermissions
    ) -> Sequence[WeightFile]:
        """Return the files of a model in a cache; empty if the cache lacks it, or clients may not read it."""
        try:
            return open_folder(_snapshot(repository_in(cache, name), revision, path), permissions, immutable=True)
        except WeightsUnavailable:
            return ()


def parse(address: str) -> tuple[str, str, str]:
    """Split an address into model name, revision and path. Each part is safe in a path on disk and in a URL.

    The path is empty if the address names the whole model.

    Raises:
        WeightsUnavailable: the address is malformed.
    """
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    path_parts = address.removeprefix("hf://")
    name, at, tail = path_parts.partition("@")
    revision, _, path = tail.partition("/")
    if not at:
        name, revision, path = "/".join(path_parts.split("/")[:2]), "main", "/".join(path_parts.split("/")[2:])
    segments = [revision, *(path.removesuffix("/").split("/") if path else ())]
    try:
        validate_repo_id(name)
        valid = address.startswith("hf://") and all(_SEGMENT.fullmatch(segment) for segment in segments)
    except HFValidationError:
        valid = False
    if not valid:
        raise WeightsUnavailable(f"{address!r} is not a hub address: write hf://organisation/model@revision/file")
    return name, revision, path


def _snapshot(repository: Path, revision: str, path: str) -> Path:
    """Return the path of a file or folder in a cache, which may not exist. Only complete files have this path."""
    commit = revision  # a revision may be a commit hash
    if not (repository / "snapshots" / revision).is_dir():
        with contextlib.suppress(OSError, ValueError):
            commit = (repository / "refs" / revision).read_text("ascii", "replace").strip() or revision
    return repository / "snapshots" / commit / path


@hookimpl
def djinn_register_weight_sources() -> Iterable[WeightSource]:
    """Return the weight source `hf:`."""
    return [HubSource()]
