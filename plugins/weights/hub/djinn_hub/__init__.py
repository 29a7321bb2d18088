"""The weight source `hf:`, which reads caches of the Hugging Face hub on the server's disk, and downloads what is permitted."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from huggingface_hub.constants import HF_HUB_CACHE

from djinn import WeightsUnavailable
from djinn.hooks import ReportDownload, WeightFile, WeightPermissions, WeightSource, hookimpl
from djinn.weights import open_folder
from djinn_hub.downloads import Downloads, is_whole, repository_in, unheard

djinn_api_version = 1

_SEGMENT: Final = re.compile(r"(?!\.{1,2}$)[^\x00-\x1f\x7f/\\%@:?#]+")  # of a revision or a path, not `.` or `..`


class HubSource:
    """Reads `hf://organisation/model@revision/file` from the permitted folders that are caches, and from the server's own cache.

    A model whose address is permitted is downloaded into the server's own cache where no cache has it.
    """

    name = "hf"

    def __init__(self, own_cache: Path | None = None, endpoint: str | None = None) -> None:
        """`own_cache`: the cache of the server's user; None: where huggingface_hub has it. `endpoint`: address of the hub, likewise."""
        self._own = own_cache or Path(HF_HUB_CACHE)
        self._downloads = Downloads(self._own, endpoint)

    def open(self, address: str, permissions: WeightPermissions) -> Sequence[WeightFile]:
        """As `WeightSource.open`."""
        return self.download(address, permissions, unheard)

    def download(self, address: str, permissions: WeightPermissions, report: ReportDownload) -> Sequence[WeightFile]:
        """As `DownloadingSource.download`."""
        name, revision, path = parse(address)
        allowed = permissions.allows(address)
        for cache in dict.fromkeys((*permissions.folders, self._own)):
            found = self._cached(cache, name, revision, path, permissions)
            if found and (not allowed or is_whole(found)):
                return found
        if not allowed:
            raise WeightsUnavailable(f"{address!r} is in no hub cache that the server reads models from (--models)")
        try:
            return self._downloads.open(name, revision, path, permissions.suffixes, report)
        except WeightsUnavailable:
            # Downloaded before, and the hub does not answer.
            repository = repository_in(self._own, name)
            own = WeightPermissions((repository,), suffixes=permissions.suffixes)
            found = self._cached(self._own, name, revision, path, own)
            if found and is_whole(found):
                return found
            raise

    @staticmethod
    def _cached(
        cache: Path, name: str, revision: str, path: str, permissions: WeightPermissions
    ) -> Sequence[WeightFile]:
        """Files that a cache has; none if it has not the model, or it may not be read."""
        repository = repository_in(cache, name)
        try:
            commit = _commit(repository, revision, permissions)
            # huggingface_hub writes a file under another name and moves it to its place when it is whole.
            return open_folder(repository / "snapshots" / commit / path, permissions, immutable=True)
        except WeightsUnavailable:
            return ()


def parse(address: str) -> tuple[str, str, str]:
    """Split an address into the model's name, the revision and the path in it. Each part is safe in a path on disk and in a URL.

    The path is empty if the address names the whole model.

    Raises:
        WeightsUnavailable: it is no such address.
    """
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    rest = address.removeprefix("hf://")
    name, at, tail = rest.partition("@")
    revision, _, path = tail.partition("/")
    if not at:
        name, revision, path = "/".join(rest.split("/")[:2]), "main", "/".join(rest.split("/")[2:])
    segments = [revision, *(path.removesuffix("/").split("/") if path else ())]
    try:
        validate_repo_id(name)
        valid = address.startswith("hf://") and all(_SEGMENT.fullmatch(one) for one in segments)
    except HFValidationError:
        valid = False
    if not valid:
        raise WeightsUnavailable(f"{address!r} is no address on the hub: hf://organisation/model@revision/file")
    return name, revision, path


def _commit(repository: Path, revision: str, permissions: WeightPermissions) -> str:
    """The commit that a cache has for a revision; the revision itself where it is one."""
    if (repository / "snapshots" / revision).is_dir():
        return revision
    reference = permissions.resolve(repository / "refs" / revision)
    return reference.read_text("ascii", "replace").strip() if reference.is_file() else revision


@hookimpl
def djinn_register_weight_sources() -> Iterable[WeightSource]:
    """The weight source `hf:`."""
    return [HubSource()]
