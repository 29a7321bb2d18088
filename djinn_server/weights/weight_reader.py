"""Read weights: open addresses that clients name, and read tensors from their files in parallel.

In a folder, all files of one weight format are read, or only the files that a shard index names.
"""

from __future__ import annotations

import re
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Final

import attrs
import msgspec
import torch

from djinn_core.errors import WeightsUnavailable
from djinn_core.logs import get_logger
from djinn_core.wire import limits
from djinn_core.wire.digests import ContentHash
from djinn_server.builtins.safetensors_files import Safetensors
from djinn_server.builtins.weights import LocalFile
from djinn_server.disk_quota import DiskQuota
from djinn_server.hookspecs.weight_formats import FileHeader, HeaderEntry, WeightFormat
from djinn_server.hookspecs.weight_sources import (
    INDEX,
    NamingSource,
    ReportDownload,
    WeightFile,
    WeightPermissions,
    WeightSink,
    WeightSource,
)
from djinn_server.system.mappings import populate
from djinn_server.weights.headers import check_header, read_bytes
from djinn_server.weights.openings import Openings
from djinn_server.weights.permissions import resolve_new
from djinn_server.weights.permitted_places import ignore_progress, open_permitted, writable_path
from djinn_server.weights.saving import ComparingSink, SavedBytes
from djinn_server.weights.shared_weights import SharedWeights, WeightKey

INDEX_LIMIT: Final = 64 << 20  # bytes of an index
SMALL_SUFFIXES: Final = (".json", ".txt", ".model", ".jinja")  # suffixes of configurations, tokenizers and templates


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


_index: msgspec.json.Decoder[_Index] = msgspec.json.Decoder(_Index)


def suffixes_of(formats: Sequence[WeightFormat]) -> tuple[str, ...]:
    """Return the file name suffixes of weight files and of their indexes."""
    return (*(suffix for form in formats for suffix in form.suffixes), INDEX)


def read_headers(
    files: Sequence[WeightFile], formats: Sequence[WeightFormat]
) -> list[tuple[WeightFile, str, FileHeader]]:
    """Return the files of the first format that has files, each with its version and header.

    Raises:
        OSError: a file cannot be read.
        ValueError: no file has weights, or a file is malformed.
    """
    for form in formats:
        files_with_headers = _files_of_format(form, files)
        if files_with_headers:
            return [(file, file.version(), _header(form, file)) for file in files_with_headers]
    suffixes = ", ".join(suffix for form in formats for suffix in form.suffixes)
    raise ValueError(
        f"no file has a weight format in use ({suffixes}); plugins/weights of Djinn's repository reads further formats"
    )


def _header(form: WeightFormat, file: WeightFile) -> FileHeader:
    header: object = form.read_header(file)  # typed as object: plugins are not type-checked
    if not isinstance(header, FileHeader):
        raise TypeError(f"the weight format {form.name!r} returned a {type(header).__name__}; return a FileHeader")
    check_header(file, header)
    return header


def _files_of_format(form: WeightFormat, files: Sequence[WeightFile]) -> list[WeightFile]:
    """Return the files of one format that must be read; empty if no file has this format.

    If the format has exactly one shard index, return the shards that it names.

    Raises:
        OSError: the index cannot be read.
        ValueError: the index is malformed or names missing files, or several files may be the model.
    """
    matching = [file for file in files if file.name.endswith(form.suffixes)]
    indexes = [file for file in files if file.name.endswith(tuple(suffix + INDEX for suffix in form.suffixes))]
    if len(indexes) == 1 and not any(file.name == indexes[0].name.removesuffix(INDEX) for file in matching):
        shards = _shards(indexes[0])
        matching = [file for file in matching if file.name in shards]
        if missing := shards.difference(file.name for file in matching):
            raise ValueError(f"the index names the shard {min(missing)!r}, which is missing")
        return matching
    if form.whole and len(matching) > 1:
        matching = [file for file in matching if file.name in form.whole]
        if len(matching) != 1:
            raise ValueError(f"the folder has several {form.name} files: name one of them in the address")
    return matching


def _shards(index: WeightFile) -> frozenset[str]:
    if index.size > INDEX_LIMIT:
        raise ValueError(f"the index {index.name} is larger than {INDEX_LIMIT:,} bytes")
    return frozenset(_index.decode(read_bytes(index, 0, index.size)).weight_map.values())


READERS: Final = 4  # threads that read
MAX_OPENED: Final = 32  # addresses that stay open
MAX_FILES: Final = 256  # open files of all addresses together
_SCHEME: Final = re.compile(r"([a-z][a-z0-9_+.-]*):")
# A source may end a path segment at `@`, `?` or `=`, so `..` is refused beside any character except letters, digits and `._-`.
_HOSTILE: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\\%]|(?<![\w.-])\.\.(?![\w.-])")
_log = get_logger("djinn.server")


@attrs.frozen
class TensorLocation:
    """Location of a tensor: its file, the version of the file, and its entry in the header."""

    file: WeightFile
    version: str
    entry: HeaderEntry


@attrs.frozen
class OpenedWeights:
    """The tensors at an address that was opened.

    Attributes:
        address: address of this version of the files. The requested address may lead to other files later.
        version: digest of the headers, sizes and versions of the files.
        tensors: entries by tensor name, in the order of the files.
        metadata: metadata strings in the files' headers.
        files: number of files.
        tied: for names of tied tensors, the name under which the shared bytes are read.
        replaceable: the only file, if the tenant may replace the file while sessions read it; else None.
    """

    address: str
    version: bytes
    tensors: Mapping[str, TensorLocation]
    metadata: Mapping[str, str]
    files: int = 1
    tied: Mapping[str, str] = attrs.field(factory=dict)
    replaceable: LocalFile | None = None


class PartRead:
    """A pending read of a part of a tensor. The read is skipped if no session refers to this object when it would start.

    Attributes:
        data: future with a CPU tensor of bytes, or with `WeightsUnavailable` if the files have changed or cannot be read.
    """

    data: Future[torch.Tensor]

    def result(self, timeout: float | None = None) -> torch.Tensor:
        """Wait for the data, and return it. `timeout`: seconds; None: no limit."""
        return self.data.result(timeout)


@attrs.frozen
class StoredBytes:
    """A part of a local weight file, from which evicted memory can be read again. It is a `SourceBytes`.

    Attributes:
        address: address of the file, for messages.
        location: location of the tensor.
        start: first byte of the part in the tensor.
    """

    address: str
    location: TensorLocation
    start: int

    def unchanged(self) -> bool:
        """Return True unless the file has changed, as `SourceBytes.unchanged` does."""
        try:
            return self.location.file.version() == self.location.version
        except OSError:
            return False

    def read_into(self, buffer: memoryview) -> None:
        """Read the bytes again, as `SourceBytes.read_into` does."""
        if len(buffer):
            self.location.entry.read_into(self.location.file, self.start, buffer)
        if not self.unchanged():
            raise OSError(_changed_text(self.address))


class WeightReader:
    """Opens addresses, reads tensors, and writes files. Thread-safe.

    Attributes:
        openings: addresses that are being opened in background threads.
        published: source of the tenant's published weights; None if the server does not publish weights.
        shared: weights in device memory that sessions share.
        reads: number of tensor parts that were read.
        read_bytes: bytes of these parts.
    """

    def __init__(
        self,
        sources: Sequence[WeightSource] = (),
        permissions: WeightPermissions | None = None,
        formats: Sequence[WeightFormat] = (Safetensors(),),
    ) -> None:
        self._sources = {source.name: source for source in sources if not isinstance(source, NamingSource)}
        self._naming = next((source for source in sources if isinstance(source, NamingSource)), None)
        self._permissions = attrs.evolve(permissions or WeightPermissions(), suffixes=suffixes_of(formats))
        self._formats = formats
        self._opened: OrderedDict[str, OpenedWeights] = OrderedDict()
        self.openings = Openings[OpenedWeights](lambda address, one: self._remember(self._open(address, one.report)))
        # Links of a journal to files that were replaced or removed, by version.
        self._kept_files: dict[bytes, OpenedWeights] = {}
        self._saved: SavedBytes | None = None
        self.published: NamingSource | None = None
        self._lock = threading.Lock()
        self._readers: ThreadPoolExecutor | None = None
        self._pending_reads: weakref.WeakValueDictionary[WeightKey, PartRead] = weakref.WeakValueDictionary()
        self.shared = SharedWeights()
        self.reads = self.read_bytes = 0

    @property
    def schemes(self) -> tuple[str, ...]:
        """URL schemes of the addresses that can be opened."""
        return tuple(sorted({*self._sources, *([self.published.name] if self.published is not None else [])}))

    def open(self, address: str) -> OpenedWeights:
        """Return the tensors at an address. The files are checked again, because they may have changed.

        Raises:
            WeightsUnavailable: the address has no weights, may not be read, or has a malformed file.
        """
        return self._remember(self._open(address))

    def _remember(self, weights: OpenedWeights) -> OpenedWeights:
        address = weights.address
        with self._lock:
            opened = self._opened.get(address)
            if opened is None or opened.version != weights.version:
                self._opened[address] = opened = weights
            self._opened.move_to_end(address)
            while len(self._opened) > 1 and (len(self._opened) > MAX_OPENED or self._files() > MAX_FILES):
                self._opened.popitem(last=False)
        return opened

    def save_in(self, folders: Path, disk: DiskQuota, tenant: str) -> None:
        """Let the tenant save and read weights in its own subfolder of `folders`.

        Raises:
            OSError: the folder cannot be made.
        """
        folder = folders / (tenant or "default")
        folder.mkdir(exist_ok=True)
        self._saved = SavedBytes(disk, folder)
        self._permissions = attrs.evolve(self._permissions, saving=(folder,))

    def publish_in(self, folders: Path, disk: DiskQuota, tenant: str) -> None:
        """Let the tenant publish weights in its own subfolder of `folders`, if a plugin supports this.

        Raises:
            OSError: the folder cannot be made.
        """
        if self._naming is not None:
            folder = folders / (tenant or "default")
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._naming.keep_in(folder, SavedBytes(disk, folder, "published", self._naming.most_files))
            self.published = self._naming

    def _naming_source(self, address: str) -> NamingSource | None:
        """Return the source of an address that is a published name; None for other addresses."""
        published = self.published
        return published if published is not None and address.startswith(f"{published.name}:") else None

    def keep_file(self, address: str, version: bytes, link: Path) -> None:
        """Hard-link the file at an address to `link`, because the file may be removed.

        If the file has another version than `version`, later reads use the existing `link` of an earlier process.
        """
        with self._lock:
            opened = self._opened.get(address)
        if opened is None or opened.version != version:
            self._open_kept_file(address, version, link)
        elif opened.replaceable is not None and not link.exists():
            try:
                link.parent.mkdir(mode=0o700, exist_ok=True)
                opened.replaceable.keep_as(link)
            except FileExistsError:  # another session with this journal's folder has linked it
                pass
            except OSError as error:
                _log.info("cannot link a weight file to a journal", address=address, reason=str(error))

    def _open_kept_file(self, address: str, version: bytes, link: Path) -> None:
        """Open the hard link that an earlier process made of the file at an address, if it has this version."""
        if version in self._kept_files or not link.exists():
            return
        path = address.partition(":")[2]
        name = PurePosixPath(path).name.removesuffix(".safetensors") + ".safetensors"
        try:
            opened = _read_opened(
                address, [LocalFile(link, name, immutable=self._naming_source(address) is not None)], self._formats
            )
        except (OSError, WeightsUnavailable):  # the link has the bytes of an upload, and no weight file
            return
        if opened.version == version:
            self._kept_files[version] = opened

    def _replaceable(self, files: Sequence[WeightFile]) -> LocalFile | None:
        """Return the only file if the tenant may replace it, else None."""
        only = files[0] if len(files) == 1 else None
        if not isinstance(only, LocalFile):
            return None
        try:
            resolve_new(self._permissions, only.path)
        except WeightsUnavailable:
            return None
        return only

    def create(self, address: str, size: int, seconds: float = 0.0) -> WeightSink:
        """Return a sink for a new file of `size` bytes at an address. `seconds`: lifetime of a published file.

        Raises:
            WeightsUnavailable: the file is not permitted or cannot be written.
        """
        if naming := self._naming_source(address):
            return naming.publish(address, size, seconds)
        source = self._source(address)
        path = writable_path(source, address, self._permissions)
        if self._saved is not None:
            self._saved.check(size)
        return source.create(path, size)

    def comparing_sink(self, address: str) -> Callable[[int], WeightSink] | None:
        """Return a function that makes a sink like `create`, but compares the existing file instead of writing it.

        Return None if no file exists at the address.
        """
        try:
            places = self.open(address).tensors.values()
        except WeightsUnavailable:
            return None
        existing = next(iter(places), None)
        return partial(ComparingSink, existing.file) if existing is not None else None

    def remove(self, address: str) -> None:
        """Remove the file at an address that can be saved to, or a published name.

        Raises:
            WeightsUnavailable: the file does not exist, is not permitted, or cannot be removed.
        """
        if naming := self._naming_source(address):
            naming.unpublish(address)
            return
        source = self._source(address)
        source.remove(writable_path(source, address, self._permissions), self._permissions.saving)
        if self._saved is not None:
            self._saved.count()

    def small_files(self, address: str) -> list[tuple[str, bytes]]:
        """Return names and contents of the configuration and tokenizer files in a folder.

        Raises:
            WeightsUnavailable: no permitted local folder has this address, or its small files are too large.
            OSError: a file cannot be read.
        """
        source = self._source(address)
        permitted = attrs.evolve(self._permissions, suffixes=SMALL_SUFFIXES)
        files = [file for file in open_permitted(source, address, permitted, None) if not file.name.startswith(".")]
        files = [file for file in files if not file.name.endswith(INDEX)]
        nbytes = sum(file.size for file in files)
        if len(files) > limits.SMALL_FILES or nbytes > limits.SMALL_FILES_BYTES:
            raise WeightsUnavailable(
                f"{address!r} has {len(files)} small files ({', '.join(SMALL_SUFFIXES)}) with {nbytes:,} bytes; at most "
                f"{limits.SMALL_FILES} files with {limits.SMALL_FILES_BYTES:,} bytes are allowed"
            )
        return [(file.name, read_bytes(file, 0, file.size)) for file in files]

    def _files(self) -> int:
        return sum(opened.files for opened in self._opened.values())

    def read(self, address: str, key: WeightKey) -> PartRead:
        """Return a pending read of a part of a tensor. If the part has a pending read, return that read.

        Raises:
            WeightsUnavailable: as in `_location`.
        """
        with self._lock:
            pending = self._pending_reads.get(key)
        if pending is not None:
            return pending
        location, readers = self._location(address, key), self._threads()
        with self._lock:
            self.reads += 1
            self.read_bytes += key.size
            part = PartRead()
            part.data = readers.submit(_read_range, weakref.ref(part), address, location, key.start, key.size)
            self._pending_reads[key] = part
        return part

    def source_of(self, address: str, key: WeightKey) -> StoredBytes | None:
        """Return a source from which a part of a tensor can be read again.

        Return None if `_location` raises WeightsUnavailable, or if the file is not on a local disk.
        """
        try:
            location = self._location(address, key)
        except WeightsUnavailable:  # the files have changed
            return None
        return StoredBytes(address, location, key.start) if isinstance(location.file, LocalFile) else None

    def canonical_key(self, address: str, key: WeightKey) -> WeightKey:
        """Return the key of the same bytes under the first name of tied tensors, so that tied weights are read once."""
        with self._lock:
            opened = self._opened.get(address)
        if opened is None or opened.version != key.version or key.name not in opened.tied:
            return key
        return attrs.evolve(key, name=opened.tied[key.name])

    def map(self, address: str, key: WeightKey) -> torch.Tensor | None:
        """Return a part of a tensor as memory-mapped bytes, or None if the part must be read.

        Raises:
            WeightsUnavailable: as in `_location`.
        """
        location = self._location(address, key)
        entry, start = location.entry, location.entry.start + key.start
        if entry.dtype is None or entry.decoding is not None or start % entry.dtype.itemsize:
            return None
        if not key.size:
            return None
        try:
            mapping = location.file.map()
            if mapping is None:
                return None
            data = torch.frombuffer(mapping, dtype=torch.uint8, count=key.size, offset=start)
            unchanged = location.file.version() == location.version
        except (OSError, ValueError) as error:  # the address space is full, or the file was truncated
            _log.info(
                "cannot map a weight file: it is read", address=address, file=location.file.name, reason=str(error)
            )
            return None
        if not unchanged:
            raise WeightsUnavailable(_changed_text(address))
        with self._lock:
            self.reads += 1
            self.read_bytes += key.size
        return data

    def populate(self, key: WeightKey) -> None:
        """Read the pages of a weight's mapped memory in the background, because all of them will be used soon."""

        def populate_held() -> None:
            storage = self.shared.peek(key)
            if storage is not None:
                populate(storage.data_ptr(), storage.nbytes())

        self._threads().submit(populate_held)

    def _threads(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._readers is None:
                self._readers = ThreadPoolExecutor(READERS, "djinn-weight-reader")
            return self._readers

    def _location(self, address: str, key: WeightKey) -> TensorLocation:
        """Return the location of a key's tensor.

        Raises:
            WeightsUnavailable: the files cannot be opened, have changed, lack the requested bytes of the tensor, or store
                it in a dtype that the server cannot decode.
        """
        with self._lock:
            opened = self._opened.get(address)
        if opened is None or opened.version != key.version:  # after a recovery, or if too many addresses were open
            opened = self._kept_files.get(key.version) or self.open(address)
        if opened.version != key.version:
            raise WeightsUnavailable(_changed_text(address))
        location = opened.tensors.get(key.name)
        if location is not None and location.entry.dtype is None:
            raise WeightsUnavailable(
                f"the tensor {key.name!r} at {address!r} is stored as {location.entry.stored_as}, which the server cannot "
                "decode: use a file with another dtype"
            )
        if location is None or key.start + key.size > location.entry.size:
            raise WeightsUnavailable(f"{address!r} has no tensor {key.name!r} with the requested bytes")
        return location

    def _source(self, address: str) -> WeightSource:
        scheme = _SCHEME.match(address)
        source = self._sources.get(scheme[1]) if scheme else None
        if source is None:
            schemes = ", ".join(f"{name}:" for name in self.schemes) or "nothing"
            raise WeightsUnavailable(f"the server reads no weights from {address!r}: it reads {schemes}")
        if _HOSTILE.search(address):
            raise WeightsUnavailable(f"{address!r} is not a valid address: it has '..', escapes or control characters")
        return source

    def _open(self, address: str, report: ReportDownload = ignore_progress) -> OpenedWeights:
        if naming := self._naming_source(address):
            exact, file = naming.find(address)
            return attrs.evolve(
                _read_opened(exact, [file], self._formats), replaceable=file if isinstance(file, LocalFile) else None
            )
        source = self._source(address)
        try:
            files = open_permitted(source, address, self._permissions, report)
        except WeightsUnavailable:
            raise
        except Exception as error:
            _log.exception("a weight source failed", source=source.name, address=address)
            raise WeightsUnavailable(
                f"{address!r} cannot be opened: {type(error).__name__}; see the server's log"
            ) from error
        opened = _read_opened(address, files, self._formats)
        return attrs.evolve(opened, replaceable=self._replaceable(files))


def _read_opened(address: str, files: Sequence[WeightFile], formats: Sequence[WeightFormat]) -> OpenedWeights:
    try:
        return _with_headers(address, read_headers(files, formats))
    except (OSError, ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
        raise WeightsUnavailable(f"{address!r} cannot be read: {error}") from error
    except (MemoryError, WeightsUnavailable):
        raise
    except Exception as error:
        _log.exception("a weight format failed", address=address)
        raise WeightsUnavailable(f"{address!r} cannot be read: {type(error).__name__}; see the server's log") from error


def _with_headers(address: str, files_with_headers: Sequence[tuple[WeightFile, str, FileHeader]]) -> OpenedWeights:
    state, tensors, metadata = ContentHash(), dict[str, TensorLocation](), dict[str, str]()
    for file, version, header in files_with_headers:
        state.update(f"{file.name}\0{file.size}\0{version}\0".encode(errors="surrogateescape"))
        metadata |= header.metadata
        for name, entry in header.tensors.items():
            if len(name) > limits.STORED_NAME:
                raise WeightsUnavailable(
                    f"the name of a tensor at {address!r} has {len(name):,} characters; the limit is {limits.STORED_NAME:,}"
                )
            if name in tensors:
                raise WeightsUnavailable(f"{address!r} has the tensor {name!r} twice: name one of its files")
            tensors[name] = TensorLocation(file, version, entry)
    if len(tensors) > limits.STORED_TENSORS:
        raise WeightsUnavailable(f"{address!r} has {len(tensors)} tensors; at most {limits.STORED_TENSORS} are allowed")
    return OpenedWeights(address, state.digest(), tensors, metadata, len(files_with_headers), _tied(tensors))


def _tied(tensors: Mapping[str, TensorLocation]) -> dict[str, str]:
    first: dict[tuple[int, int, int], str] = {}
    names: dict[str, str] = {}
    for name, location in tensors.items():
        entry = location.entry
        if entry.dtype is not None and entry.decoding is None and entry.size:
            before = first.setdefault((id(location.file), entry.start, entry.size), name)
            if before != name and tensors[before].entry.dtype is entry.dtype:
                names[name] = before
    return names


def _read_range(
    is_wanted: Callable[[], object], address: str, location: TensorLocation, start: int, size: int
) -> torch.Tensor:
    if is_wanted() is None:
        return torch.empty(0, dtype=torch.uint8)
    data = torch.empty(size, dtype=torch.uint8)
    try:
        if size:
            location.entry.read_into(location.file, start, data.numpy().data)
        unchanged = location.file.version() == location.version
    except OSError as error:
        raise WeightsUnavailable(f"{address!r} cannot be read: {error.strerror or error}") from error
    except (RuntimeError, MemoryError):  # memory is short
        raise
    except Exception as error:
        _log.exception("a weight source failed", address=address)
        raise WeightsUnavailable(f"{address!r} cannot be read: {type(error).__name__}; see the server's log") from error
    if not unchanged:
        raise WeightsUnavailable(_changed_text(address))
    return data


def _changed_text(address: str) -> str:
    return f"the files at {address!r} have changed since they were opened: open them again"
