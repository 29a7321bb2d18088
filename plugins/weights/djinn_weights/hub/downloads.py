"""Download weight files of models from the Hugging Face hub into a cache, through huggingface_hub.

huggingface_hub is imported on first use, because its HTTP client would add 0.25 s to every start.
"""

from __future__ import annotations

import json
import secrets
import shutil
import threading
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import attrs

from djinn.errors import WeightsUnavailable
from djinn.hooks import ReportDownload, WeightFile, WeightPermissions
from djinn_server.builtins.weights import open_folder

_INDEX: Final = ".index.json"
_PREFERRED_SUFFIXES: Final = (
    ".safetensors",
    ".bin",
)  # For a folder, the first of these suffixes that has files is downloaded. Others must be named.
_SINGLE_FILES: Final = ("pytorch_model.bin", "diffusion_pytorch_model.bin", "adapter_model.bin")
_INDEX_LIMIT: Final = 64 << 20
_CONCURRENT_DOWNLOADS: Final = 4
_TIMEOUT_SECONDS: Final = 20.0  # timeout in seconds for a response about a model
RESERVE: Final = 1 << 30  # bytes of the disk that stay free


def ignore_progress(bytes_done: int, bytes_expected: int) -> None:
    """Ignore the progress of a download. This is for an index, whose progress is not reported to clients."""


class _Progress:
    """Sum of the received bytes of all files of a download, reported to `report(bytes_done, expected)`. Thread-safe."""

    def __init__(self, expected: int, report: ReportDownload) -> None:
        self._expected = expected
        self._report = report
        self._done = 0
        self._lock = threading.Lock()

    def add_received(self, nbytes: float) -> None:
        """Add a number of received bytes, and report the sum. An exception of `report` propagates."""
        with self._lock:
            self._done += int(nbytes)
            bytes_done = self._done
        self._report(bytes_done, self._expected)


def _progress_bars(progress: _Progress) -> type[Any]:
    """Return a progress bar class for huggingface_hub that adds to `progress`. Drawn bars would fill the server's log."""
    from huggingface_hub.utils.tqdm import tqdm

    class SilentBar(tqdm):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options | {"disable": True})  # type: ignore[no-untyped-call]
            progress.add_received(options.get("initial") or 0)

        def update(self, n: float | None = 1) -> None:
            progress.add_received(n or 0)

    return SilentBar


def repository_in(cache: Path, name: str) -> Path:
    """Return the folder of a model in a cache."""
    from huggingface_hub.file_download import repo_folder_name

    return cache / repo_folder_name(repo_id=name, repo_type="model")


@attrs.frozen
class Downloads:
    """Downloader of models into a cache.

    Attributes:
        cache: the cache's folder.
        endpoint: address of the hub. None selects the address that huggingface_hub is configured for.
    """

    cache: Path
    endpoint: str | None = None

    def open(
        self, name: str, revision: str, path: str, suffixes: tuple[str, ...], report: ReportDownload
    ) -> Sequence[WeightFile]:
        """Open a file or folder of a model, or the whole model, after downloading missing files.

        `suffixes`: suffixes of weight files.

        Raises:
            WeightsUnavailable: `path` has no weights, the disk is full, or the hub refuses or does not answer.
        """
        from huggingface_hub import HfApi

        repository = repository_in(self.cache, name)
        try:
            info = HfApi(endpoint=self.endpoint).model_info(
                name, revision=revision, files_metadata=True, timeout=_TIMEOUT_SECONDS
            )
            sizes = {sibling.rfilename: sibling.size or 0 for sibling in info.siblings or ()}
            commit = str(info.sha)
            self._fetch(name, commit, sizes, path, suffixes, report)
            _write_reference(repository / "refs" / revision, commit)
        except WeightsUnavailable:
            raise
        except Exception as error:
            # The hub's error may name the server's account.
            raise WeightsUnavailable(
                f"the server cannot download {name!r} from the hub ({type(error).__name__}): check the model's name, the "
                "revision and the server's HF_TOKEN"
            ) from error
        permissions = WeightPermissions((repository,), suffixes=suffixes)
        return open_folder(repository / "snapshots" / commit / path, permissions, immutable=True)

    def _fetch(
        self,
        name: str,
        commit: str,
        sizes: dict[str, int],
        path: str,
        suffixes: tuple[str, ...],
        report: ReportDownload,
    ) -> None:
        self.cache.mkdir(parents=True, exist_ok=True)
        folder, index, files = select_files(sizes, path, suffixes)
        if index and sizes[index] > _INDEX_LIMIT:
            raise WeightsUnavailable(f"the index of {name!r} has {sizes[index]:,} bytes; the limit is {_INDEX_LIMIT:,}")
        if index:
            shard_files = {
                shard
                for name_in_index in _shards(self._get(name, commit, index))
                if (shard := folder + name_in_index) in sizes
            }
            files = [index, *sorted(shard_files)]
        missing = [file for file in files if not isinstance(self._cached_files(name, commit, file), str)]
        nbytes = sum(sizes[file] for file in missing)
        if missing and nbytes + RESERVE > shutil.disk_usage(self.cache).free:
            raise WeightsUnavailable(
                f"the server's disk has less than {nbytes + RESERVE:,} free bytes, which {name!r} needs"
            )
        progress = _Progress(nbytes, report)
        with ThreadPoolExecutor(_CONCURRENT_DOWNLOADS, "djinn-hub") as threads:
            for _ in threads.map(lambda file: self._get(name, commit, file, progress), missing):
                pass

    def _cached_files(self, name: str, commit: str, file: str) -> Any:
        from huggingface_hub import try_to_load_from_cache

        return try_to_load_from_cache(name, file, cache_dir=self.cache, revision=commit)

    def _get(self, name: str, commit: str, file: str, progress: _Progress | None = None) -> Path:
        from huggingface_hub import hf_hub_download

        path = hf_hub_download(
            name,
            file,
            revision=commit,
            cache_dir=self.cache,
            endpoint=self.endpoint,
            tqdm_class=_progress_bars(progress or _Progress(0, ignore_progress)),
        )
        return Path(str(path))


def select_files(files: Collection[str], path: str, suffixes: tuple[str, ...]) -> tuple[str, str, list[str]]:
    """Return the files of a model that `path` names: its folder, the index or "", and the weight files to download.

    If the folder has an index, the list of weight files is empty: the index names them. A non-empty folder ends with "/".

    Raises:
        WeightsUnavailable: `path` is not a weight file, or its folder has no weight files or an ambiguous set of them.
    """
    if path in files:
        if not path.endswith(suffixes):
            raise WeightsUnavailable(f"{path!r} is not a weight file: its name must end with {' or '.join(suffixes)}")
        return path[: path.rfind("/") + 1], path if path.endswith(_INDEX) else "", [path]
    folder = f"{path.rstrip('/')}/" if path else ""
    in_folder = [file.removeprefix(folder) for file in files if file.startswith(folder)]
    for kind in (suffix for suffix in _PREFERRED_SUFFIXES if suffix in suffixes):
        weight_files = sorted(file for file in in_folder if file.endswith(kind) and "/" not in file)
        index_files = [file for file in in_folder if file.endswith(kind + _INDEX) and "/" not in file]
        if len(index_files) == 1 and index_files[0].removesuffix(_INDEX) not in weight_files:
            return folder, folder + index_files[0], []
        if kind == ".bin" and len(weight_files) > 1:
            weight_files = [file for file in weight_files if file in _SINGLE_FILES]
        if weight_files:
            return folder, "", [folder + file for file in weight_files]
    raise WeightsUnavailable("the model has no weight file, or several: name a weight file in the address")


def is_complete(files: Sequence[WeightFile]) -> bool:
    """Return True if `files`, the files of a model in a cache, include all files that the index names.

    A download that failed leaves an incomplete model.
    """
    names = {file.name for file in files}
    for kind in _PREFERRED_SUFFIXES:
        indexes = [file for file in files if file.name.endswith(kind + _INDEX)]
        if any(name.endswith(kind) for name in names):
            if len(indexes) == 1 and indexes[0].name.removesuffix(_INDEX) not in names:
                return indexes[0].size <= _INDEX_LIMIT and _shard_names(_read_all(indexes[0])) <= names
            return True
    return any(not name.endswith(_INDEX) for name in names)


def _read_all(file: WeightFile) -> bytes:
    data = bytearray(file.size)
    file.read_into(0, memoryview(data))
    return bytes(data)


def _shards(index: Path) -> set[str]:
    names = _shard_names(index.read_bytes())
    if not names:
        raise WeightsUnavailable(f"{index.name!r} is not an index of shards")
    return names


def _shard_names(index: bytes) -> set[str]:
    """Return the names of the shards in an index file's contents, or an empty set if they are not an index."""
    try:
        return {name for name in json.loads(index)["weight_map"].values() if isinstance(name, str)}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return set()


def _write_reference(reference: Path, commit: str) -> None:
    """Write the commit of a branch or tag to the file `reference`, after all files of the commit are complete.

    Like huggingface_hub, replace the file atomically, with the mode of the umask. An unchanged file is not written,
    because the server may have no permission to write to a cache of another user.
    """
    if reference.name == commit or (reference.is_file() and reference.read_text() == commit):
        return
    reference.parent.mkdir(parents=True, exist_ok=True)
    temporary = reference.with_name(f"{reference.name}.{secrets.token_hex(8)}.tmp")
    try:
        temporary.write_text(commit)
        temporary.replace(reference)
    finally:
        temporary.unlink(missing_ok=True)
