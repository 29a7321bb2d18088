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
from djinn_weights.hub.downloads import Downloads, is_complete, repository_in

djinn_api_version = "2.0"

_SEGMENT: Final = re.compile(r"(?!\.{1,2}$)[^\x00-\x1f\x7f/\\%@:?#]+")  # part of a revision or path, not `.` or `..`


class HubSource(WeightSource):
    """Read `hf://organisation/model@revision/file` from caches in permitted folders, and from the server's own cache.

    If no cache has a permitted model, it is downloaded into the server's own cache.
    """

    name = "hf"

    def __init__(self, own_cache: Path | None = None, endpoint: str | None = None) -> None:
        """`own_cache`: cache of the server's user. `endpoint`: address of the hub.

        None selects the default of huggingface_hub.
        """
        self._own_cache = own_cache or Path(HF_HUB_CACHE)
        self._downloads = Downloads(self._own_cache, endpoint)

    def places(self, address: str, folders: Sequence[Path]) -> Sequence[LocalPlace | str]:
        """Return the address, which `download` opens, then the path of the model in each cache."""
        name, revision, path = parse(address)
        caches = [repository_in(cache, name) for cache in self._caches(folders)]
        return [address, *(LocalPlace(_snapshot(folder, revision, path), immutable=True) for folder in caches)]

    def download(self, address: str, permissions: WeightPermissions, report: ReportDownload) -> Sequence[WeightFile]:
        """Open the files of an address from a permitted cache that has all of them. Otherwise download missing files.

        If the download fails, open a complete copy in the own cache. Like a download, it needs no permission.
        """
        name, revision, path = parse(address)
        for cache in self._caches(permissions.folders):
            cached_files = self._cached_files(cache, name, revision, path, permissions)
            if cached_files and is_complete(cached_files):
                return cached_files
        try:
            return self._downloads.open(name, revision, path, permissions.suffixes, report)
        except WeightsUnavailable:
            # a cached copy, if the hub does not answer
            repository = repository_in(self._own_cache, name)
            own = WeightPermissions((repository,), suffixes=permissions.suffixes)
            cached_files = self._cached_files(self._own_cache, name, revision, path, own)
            if cached_files and is_complete(cached_files):
                return cached_files
            raise

    def _caches(self, folders: Sequence[Path]) -> Sequence[Path]:
        return list(dict.fromkeys((*folders, self._own_cache)))

    @staticmethod
    def _cached_files(
        cache: Path, name: str, revision: str, path: str, permissions: WeightPermissions
    ) -> Sequence[WeightFile]:
        """Return the files of a model in a cache, or () if the cache lacks the model or clients may not read it."""
        try:
            return open_folder(_snapshot(repository_in(cache, name), revision, path), permissions, immutable=True)
        except WeightsUnavailable:
            return ()


def parse(address: str) -> tuple[str, str, str]:
    """Split an address into model name, revision and path. Each part is safe in a path on disk and in a URL.

    If the address names the whole model, the path is "". The default revision is `main`.

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
    """Return the path of a file or folder of a model. `repository`: folder of the model in a cache."""
    commit = revision  # a revision may be a commit hash
    if not (repository / "snapshots" / revision).is_dir():
        with contextlib.suppress(OSError, ValueError):
            commit = (repository / "refs" / revision).read_text("ascii", "replace").strip() or revision
    return repository / "snapshots" / commit / path


@hookimpl
def djinn_register_weight_sources() -> Iterable[WeightSource]:
    """Return the weight source `hf:`."""
    return [HubSource()]
