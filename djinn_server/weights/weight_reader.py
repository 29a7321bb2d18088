"""Read weights: open addresses that clients name, and read tensors from their files in parallel.

In a folder, files of a weight format are read, or only the files that an index names.
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
from djinn_server.weights.saving import SavedBytes, WrittenFile
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
    """Read the headers of weight files. Return each file with its version and its header.

    Raises:
        OSError: a file cannot be read.
        ValueError: no file has weights, or a file is malformed.
    """
    for form in formats:
        counted = _counted(form, files)
        if counted:
            return [(file, file.version(), _header(form, file)) for file in counted]
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


def _counted(form: WeightFormat, files: Sequence[WeightFile]) -> list[WeightFile]:
    """Return the files of one format that must be read; empty if no file has this format.

    If there is one shard index, these are its shards.

    Raises:
        OSError: the index cannot be read.
        ValueError: the index is malformed or names missing files, or several files may be the model.
    """
    matching = [file for file in files if file.name.endswith(form.suffixes)]
    named = [file for file in files if file.name.endswith(tuple(suffix + INDEX for suffix in form.suffixes))]
    if len(named) == 1 and not any(file.name == named[0].name.removesuffix(INDEX) for file in matching):
        shards = _shards(named[0])
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


READERS: Final = 4  # threads that read at a time
OPENED: Final = 32  # addresses that stay open
FILES: Final = 256  # that they have together
_SCHEME: Final = re.compile(r"([a-z][a-z0-9_+.-]*):")
# Some source may end a segment at `@`, `?` or `=`, so `..` is refused beside any such character.
_HOSTILE: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\\%]|(?<![\w.-])\.\.(?![\w.-])")
_log = get_logger("djinn.server")


@attrs.frozen
class StoredPlace:
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
        replaceable: the only file, if the tenant may replace it while sessions read it; else None.
    """

    address: str
    version: bytes
    tensors: Mapping[str, StoredPlace]
    metadata: Mapping[str, str]
    files: int = 1
    tied: Mapping[str, str] = attrs.field(factory=dict)
    replaceable: LocalFile | None = None


class PartRead:
    """A pending read of a part of a tensor. It is skipped if no session refers to this object when it would start.

    Attributes:
        data: future with a CPU tensor of bytes, or with `WeightsUnavailable` if the files have changed or cannot be read.
    """

    data: Future[torch.Tensor]

    def result(self, timeout: float | None = None) -> torch.Tensor:
        """Wait for the data, and return it."""
        return self.data.result(timeout)


@attrs.frozen
class StoredBytes:
    """Source of bytes that were read from a local weight file, so that evicted memory can be read again."""

    address: str
    place: StoredPlace
    start: int

    def unchanged(self) -> bool:
        """Return True unless the file has changed, as `SourceBytes.unchanged` does."""
        try:
            return self.place.file.version() == self.place.version
        except OSError:
            return False

    def read_into(self, buffer: memoryview) -> None:
        """Reread the bytes into a buffer, as `SourceBytes.read_into` does."""
        if len(buffer):
            self.place.entry.read_into(self.place.file, self.start, buffer)
        if not self.unchanged():
            raise OSError(_changed(self.address))


class WeightReader:
    """Opens addresses, reads tensors, and writes files. Thread-safe.

    Attributes:
        openings: pending calls of `open`, one per address.
        published: source of the tenant's published weights; None: publishing is not allowed.
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
        # Files that others have replaced, and a journal has kept, by version.
        self._kept: dict[bytes, OpenedWeights] = {}
        self._saved: SavedBytes | None = None
        self.published: NamingSource | None = None
        self._lock = threading.Lock()
        self._readers: ThreadPoolExecutor | None = None
        self._under_way: weakref.WeakValueDictionary[WeightKey, PartRead] = weakref.WeakValueDictionary()
        self.shared = SharedWeights()
        self.reads = self.read_bytes = 0

    @property
    def schemes(self) -> tuple[str, ...]:
        """URL schemes of the addresses that can be opened."""
        return tuple(sorted({*self._sources, *([self.published.name] if self.published is not None else [])}))

    def open(self, address: str) -> OpenedWeights:
        """Return the tensors at an address. The files are checked again, as they may have changed.

        Raises:
            WeightsUnavailable: the address has no weights, may not be read, or has a malformed file.
        """
        return self._remember(self._open(address))

    def _remember(self, found: OpenedWeights) -> OpenedWeights:
        address = found.address
        with self._lock:
            opened = self._opened.get(address)
            if opened is None or opened.version != found.version:
                self._opened[address] = opened = found
            self._opened.move_to_end(address)
            while len(self._opened) > 1 and (len(self._opened) > OPENED or self._files() > FILES):
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

    def hold(self, address: str, version: bytes, link: Path) -> None:
        """Hard-link the file at an address to `link`, because it may be removed. If it has changed, open `link`."""
        with self._lock:
            opened = self._opened.get(address)
        if opened is None or opened.version != version:
            self._find_kept(address, version, link)
        elif opened.replaceable is not None and not link.exists():
            try:
                link.parent.mkdir(mode=0o700, exist_ok=True)
                opened.replaceable.keep_as(link)
            except FileExistsError:  # another session of this journal's folder was first
                pass
            except OSError as error:
                _log.info("cannot link a weight file to a journal", address=address, reason=str(error))

    def _find_kept(self, address: str, version: bytes, link: Path) -> None:
        """Open the hard link that an earlier process made of the file at an address."""
        if version in self._kept or not link.exists():
            return
        path = address.partition(":")[2]
        name = PurePosixPath(path).name.removesuffix(".safetensors") + ".safetensors"
        try:
            opened = _opened(
                address, [LocalFile(link, name, immutable=self._naming_source(address) is not None)], self._formats
            )
        except (OSError, WeightsUnavailable):  # these are a blob's bytes
            return
        if opened.version == version:
            self._kept[version] = opened

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
        """Create a file of `size` bytes at an address. `seconds`: lifetime of a published file.

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

    def written(self, address: str) -> Callable[[int], WeightSink] | None:
        """Return a function like `create`, whose sink compares an existing file. Return None if no file exists."""
        try:
            places = self.open(address).tensors.values()
        except WeightsUnavailable:
            return None
        existing = next(iter(places), None)
        return partial(WrittenFile, existing.file) if existing is not None else None

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
                f"{address!r} has {len(files)} small files ({', '.join(SMALL_SUFFIXES)}) with {nbytes:,} bytes; "
                f"{limits.SMALL_FILES} with {limits.SMALL_FILES_BYTES:,} bytes are the limit"
            )
        return [(file.name, read_bytes(file, 0, file.size)) for file in files]

    def _files(self) -> int:
        return sum(opened.files for opened in self._opened.values())

    def read(self, address: str, key: WeightKey) -> PartRead:
        """Start to read a part of a tensor, or return the pending read of it.

        Raises:
            WeightsUnavailable: the files have another version now.
        """
        with self._lock:
            coming = self._under_way.get(key)
        if coming is not None:
            return coming
        place, readers = self._place(address, key), self._threads()
        with self._lock:
            self.reads += 1
            self.read_bytes += key.size
            begun = PartRead()
            begun.data = readers.submit(_read, weakref.ref(begun), address, place, key.start, key.size)
            self._under_way[key] = begun
        return begun

    def source_of(self, address: str, key: WeightKey) -> StoredBytes | None:
        """Return the source of bytes that were just read, for a second read; None if they are not on a local disk."""
        try:
            place = self._place(address, key)
        except WeightsUnavailable:  # it has changed since
            return None
        return StoredBytes(address, place, key.start) if isinstance(place.file, LocalFile) else None

    def untied(self, address: str, key: WeightKey) -> WeightKey:
        """Return the key of these bytes under the first of their names, so that tied weights are read once."""
        with self._lock:
            opened = self._opened.get(address)
        if opened is None or opened.version != key.version or key.name not in opened.tied:
            return key
        return attrs.evolve(key, name=opened.tied[key.name])

    def map(self, address: str, key: WeightKey) -> torch.Tensor | None:
        """Return a part of a tensor as memory-mapped bytes; None if it must be read.

        Raises:
            WeightsUnavailable: the files have another version now, or lack this part.
        """
        place = self._place(address, key)
        entry, start = place.entry, place.entry.start + key.start
        if entry.dtype is None or entry.decoding is not None or start % entry.dtype.itemsize:
            return None
        if not key.size:
            return None
        try:
            mapping = place.file.map()
            if mapping is None:
                return None
            data = torch.frombuffer(mapping, dtype=torch.uint8, count=key.size, offset=start)
            unchanged = place.file.version() == place.version
        except (OSError, ValueError) as error:  # there is no room for it, or it is not as long as it was
            _log.info("reading a weight file: cannot map it", address=address, file=place.file.name, reason=str(error))
            return None
        if not unchanged:
            raise WeightsUnavailable(_changed(address))
        with self._lock:
            self.reads += 1
            self.read_bytes += key.size
        return data

    def populate(self, key: WeightKey) -> None:
        """Read the pages of a key's mapped memory in the background, because all of them will be used soon."""

        def populate_held() -> None:
            storage = self.shared.held(key)
            if storage is not None:
                populate(storage.data_ptr(), storage.nbytes())

        self._threads().submit(populate_held)

    def _threads(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._readers is None:
                self._readers = ThreadPoolExecutor(READERS, "djinn-weight-reader")
            return self._readers

    def _place(self, address: str, key: WeightKey) -> StoredPlace:
        """Return the location of a key's tensor, in the open files or in the present files."""
        with self._lock:
            opened = self._opened.get(address)
        if opened is None or opened.version != key.version:  # this session was recovered, or many addresses are open
            opened = self._kept.get(key.version) or self.open(address)
        if opened.version != key.version:
            raise WeightsUnavailable(_changed(address))
        place = opened.tensors.get(key.name)
        if place is not None and place.entry.dtype is None:
            raise WeightsUnavailable(
                f"the tensor {key.name!r} at {address!r} is stored as {place.entry.stored_as}, which the server cannot "
                "decode: use a file with another dtype"
            )
        if place is None or key.start + key.size > place.entry.size:
            raise WeightsUnavailable(f"{address!r} has no tensor {key.name!r} with the requested bytes")
        return place

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
                _opened(exact, [file], self._formats), replaceable=file if isinstance(file, LocalFile) else None
            )
        source = self._source(address)
        try:
            files = open_permitted(source, address, self._permissions, report)
        except WeightsUnavailable:
            raise
        except Exception as error:
            _log.exception("a weight source failed", source=source.name, address=address)
            raise WeightsUnavailable(f"{address!r} cannot be opened: {type(error).__name__}") from error
        opened = _opened(address, files, self._formats)
        return attrs.evolve(opened, replaceable=self._replaceable(files))


def _opened(address: str, files: Sequence[WeightFile], formats: Sequence[WeightFormat]) -> OpenedWeights:
    try:
        return _with_headers(address, read_headers(files, formats))
    except (OSError, ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
        raise WeightsUnavailable(f"{address!r} cannot be read: {error}") from error
    except (MemoryError, WeightsUnavailable):
        raise
    except Exception as error:
        _log.exception("a weight format failed", address=address)
        raise WeightsUnavailable(f"{address!r} cannot be read: {type(error).__name__}") from error


def _with_headers(address: str, counted: Sequence[tuple[WeightFile, str, FileHeader]]) -> OpenedWeights:
    state, tensors, metadata = ContentHash(), dict[str, StoredPlace](), dict[str, str]()
    for file, version, header in counted:
        state.update(f"{file.name}\0{file.size}\0{version}\0".encode(errors="surrogateescape"))
        metadata |= header.metadata
        for name, entry in header.tensors.items():
            if len(name) > limits.STORED_NAME:
                raise WeightsUnavailable(f"the name of a tensor at {address!r} has {len(name):,} characters")
            if name in tensors:
                raise WeightsUnavailable(f"{address!r} has the tensor {name!r} twice: name one of its files")
            tensors[name] = StoredPlace(file, version, entry)
    if len(tensors) > limits.STORED_TENSORS:
        raise WeightsUnavailable(f"{address!r} has {len(tensors)} tensors; {limits.STORED_TENSORS} are the limit")
    return OpenedWeights(address, state.digest(), tensors, metadata, len(counted), _tied(tensors))


def _tied(tensors: Mapping[str, StoredPlace]) -> dict[str, str]:
    first: dict[tuple[int, int, int], str] = {}
    names: dict[str, str] = {}
    for name, place in tensors.items():
        entry = place.entry
        if entry.dtype is not None and entry.decoding is None and entry.size:
            before = first.setdefault((id(place.file), entry.start, entry.size), name)
            if before != name and tensors[before].entry.dtype is entry.dtype:
                names[name] = before
    return names


def _read(wanted: Callable[[], object], address: str, place: StoredPlace, start: int, size: int) -> torch.Tensor:
    if wanted() is None:
        return torch.empty(0, dtype=torch.uint8)
    data = torch.empty(size, dtype=torch.uint8)
    try:
        if size:
            place.entry.read_into(place.file, start, data.numpy().data)
        unchanged = place.file.version() == place.version
    except OSError as error:
        raise WeightsUnavailable(f"{address!r} cannot be read: {error.strerror or error}") from error
    except (RuntimeError, MemoryError):  # there is no room
        raise
    except Exception as error:
        _log.exception("a weight source failed", address=address)
        raise WeightsUnavailable(f"{address!r} cannot be read: {type(error).__name__}") from error
    if not unchanged:
        raise WeightsUnavailable(_changed(address))
    return data


def _changed(address: str) -> str:
    return f"the files at {address!r} have changed since they were opened: open them again"
