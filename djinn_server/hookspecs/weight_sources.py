"""`djinn_register_weight_sources`: resolve the addresses of weights, such as `hf://org/model`, on an executor."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from mmap import mmap
from pathlib import Path
from typing import Any, Final, Protocol

import attrs

from djinn_core.errors import WeightsUnavailable
from djinn_core.hookspecs import hookspec
from djinn_core.hookspecs.transports import Buffer
from djinn_core.wire.weight_messages import PublishedEntry

INDEX: Final = ".index.json"
"""End of the name of an index: it names the files that a model is divided into."""


@attrs.frozen
class WeightPermissions:
    """Permissions of a server's clients to read and save weights, set by the operator.

    Attributes:
        folders: folders on the server's disk (`--models`) whose contents may be read.
        addresses: patterns of permitted addresses (`--allow-weights`) such as `hf://meta-llama/*`. Between `://` and the
            next `/` (a host, bucket or organization), `*` does not match `/`. After that, it matches any characters.
        saving: folders in which the tenant may save and read weights (`--save-weights`).
        hidden: folders with files of all tenants. Clients may read only subfolders of them that are in `saving`.
        suffixes: file name suffixes of weight files and their indexes. A source offers only files with these suffixes.
    """

    folders: tuple[Path, ...] = ()
    addresses: tuple[str, ...] = ()
    saving: tuple[Path, ...] = ()
    hidden: tuple[Path, ...] = ()
    suffixes: tuple[str, ...] = (".safetensors", INDEX)


class WeightFile(ABC):
    """A weight file that is open for reading.

    Several threads of an executor read it at the same time. The file closes when it is garbage-collected.

    Attributes:
        name: file name, such as `model-00001-of-00002.safetensors`. The suffix selects the weight format.
        size: size in bytes.
    """

    name: str
    size: int

    @abstractmethod
    def version(self) -> str:
        """Return a string that changes if the contents may have changed. Called before and after each read: be quick.

        Raises:
            OSError: the version cannot be determined.
        """

    @abstractmethod
    def read_into(self, start: int, buffer: memoryview) -> None:
        """Fill `buffer` (bytes) with the contents, beginning at byte `start`.

        Raises:
            OSError: the file cannot be read, or ends before the buffer is full.
        """

    def map(self) -> Buffer | mmap | None:
        """Return all bytes of the file as writable private memory, or None if the file cannot be mapped.

        The memory is mapped until it is garbage-collected. A device that computes in host memory uses the mapping instead of
        copies. Map only files that no process writes into or truncates: if a mapped file becomes shorter, the process that
        reads it is killed.

        Raises:
            OSError: the file cannot be mapped. The executor then reads the file.
        """
        return None


@attrs.frozen
class LocalPlace:
    """A path on the server's disk.

    Attributes:
        path: a file, or a folder with the files of one model.
        immutable: True if files are replaced as a whole, never written or truncated in place. The executor may map them into memory.
    """

    path: Path
    immutable: bool = False


class WeightSink(ABC):
    """A file that is being written. Readers see the old file until `commit`.

    The executor always calls `discard` at the end, even after `commit`.
    """

    @abstractmethod
    def write(self, data: memoryview) -> None:
        """Append bytes.

        Raises:
            OSError: the bytes cannot be written.
        """

    @abstractmethod
    def commit(self) -> None:
        """Replace the old file by the complete new file, durably.

        Raises:
            OSError: the old file cannot be replaced, and remains.
        """

    @abstractmethod
    def discard(self) -> None:
        """Delete the unfinished file. Do nothing after `commit`."""


ReportDownload = Callable[[int, int], None]
"""Called with the bytes that have arrived and the bytes that are expected. Raises `WeightsUnavailable` once no client waits."""


class WeightSource(ABC):
    """Resolve addresses of one scheme to places, in an executor process. Threads may call a source at the same time.

    A source opens no file on the server's disk. The executor checks each place against the operator's permissions and opens it.
    A source raises `WeightsUnavailable`, whose text the client receives. The executor logs any other exception and tells the
    client only its type.

    Attributes:
        name: the scheme in lower case, such as `hf` for `hf://org/model`.
    """

    name: str

    @abstractmethod
    def places(self, address: str, folders: Sequence[Path]) -> Sequence[LocalPlace | str]:
        """Return candidate places of an address in the order in which the executor tries them.

        The executor skips places that clients may not read. It opens a `LocalPlace` itself, and passes a network address (a
        string) to `download`.

        Args:
            address: an address without `..` segments, control characters, backslashes and percent escapes. After the
                scheme, it may be an absolute path.
            folders: folders that clients may read. A relative address is relative to each of them.

        Raises:
            WeightsUnavailable: the address does not have the form that this source requires.
        """

    def open(self, address: str, permissions: WeightPermissions) -> Sequence[WeightFile]:
        """Open a network address that clients may read. Return one file, or the weight files and indexes of a folder.

        A source whose `places` returns network addresses implements `open` or `download`.

        Args:
            address: an element of the result of `places`.
            permissions: call `djinn.weights.allows` before you request another address, such as a redirect or a shard.

        Raises:
            WeightsUnavailable: the address has no file, or the file cannot be read.
        """
        raise NotImplementedError(f"the weight source {self.name!r} has no method to open {address!r}")

    def download(self, address: str, permissions: WeightPermissions, report: ReportDownload) -> Sequence[WeightFile]:
        """Open a network address as `open` does, and report the progress of the download to clients.

        Call `report` from any thread, at least once a second while bytes arrive. If it raises, end the download.
        """
        return self.open(address, permissions)

    def create(self, path: Path, size: int) -> WeightSink:
        """Begin to write a file of `size` bytes at `path`. The executor has checked that the tenant may write the file.

        Raises:
            WeightsUnavailable: the file cannot be written, or this source saves nothing (default).
        """
        raise WeightsUnavailable(f"cannot save {path.name!r}: addresses beginning with `{self.name}:` are read-only")

    def remove(self, path: Path, folders: Sequence[Path]) -> None:
        """Remove a file and its empty parent folders. Folders in `folders` stay.

        Raises:
            WeightsUnavailable: the file does not exist (the cause is a `FileNotFoundError`), cannot be removed, or this source
                removes nothing (default).
        """
        raise WeightsUnavailable(f"cannot remove {path.name!r}: addresses beginning with `{self.name}:` are read-only")


class FileRoom(Protocol):
    """Limits on the files in a folder, by the tenant's disk quota."""

    def check(self, size: int) -> None:
        """Check that one more file of `size` bytes is allowed.

        Raises:
            WeightsUnavailable: the quota or the disk does not allow the file.
        """

    def count(self) -> None:
        """Count the files in the folder again, after files were removed."""


class NamingSource(WeightSource):
    """Store files that clients publish under names, for one tenant. Provisional: for packages of Djinn's repository.

    The source opens its files itself, in a folder (`--published`) that no other address reaches.

    Attributes:
        most_files: maximum number of files in the folder.
    """

    most_files: int

    def places(self, address: str, folders: Sequence[Path]) -> Sequence[LocalPlace | str]:
        """Return an empty sequence, because `find` opens the addresses of this source."""
        return ()

    @abstractmethod
    def keep_in(self, folder: Path, room: FileRoom) -> None:
        """Use a folder of the tenant, which exists. Called once, before other methods.

        Raises:
            OSError: the folder cannot be used.
        """

    @abstractmethod
    def publish(self, address: str, size: int, seconds: float) -> WeightSink:
        """Create a file of `size` bytes under a name. `commit` removes older files of the name.

        Raises:
            WeightsUnavailable: the name or the lifetime (`seconds`; 0: the maximum) is invalid, or the quota is reached.
        """

    @abstractmethod
    def find(self, address: str) -> tuple[str, WeightFile]:
        """Open a published name, or the address of one of its files. Return the file's address, and the file.

        Raises:
            WeightsUnavailable: the name or file does not exist, or has expired.
        """

    @abstractmethod
    def listing(self) -> Sequence[PublishedEntry]:
        """Return the published entries by name.

        Raises:
            OSError: the folder cannot be read.
        """

    @abstractmethod
    def unpublish(self, address: str) -> None:
        """Remove a published name. Sessions that have opened it can still use the weights.

        Raises:
            WeightsUnavailable: the name is not published (the cause is a `FileNotFoundError`), or its files cannot be removed.
        """


@hookspec
def djinn_register_weight_sources(settings: Any) -> Iterable[WeightSource]:
    """Return the weight sources that this plugin offers.

    Called once in each executor process. `file:` is built in. An address whose scheme has no
    source is refused; the message lists the known schemes. An exception disables the plugin.
    """
    del settings
    raise NotImplementedError
