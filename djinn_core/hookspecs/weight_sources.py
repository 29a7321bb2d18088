"""`djinn_register_weight_sources`: where an executor reads the weights that clients name by an address."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final, Protocol, runtime_checkable

import attrs

from djinn_core.hookspecs import hookspec
from djinn_core.hookspecs.transports import Buffer

INDEX: Final = ".index.json"
"""End of the name of an index: it names the files that a model is divided into."""


@attrs.frozen
class WeightPermissions:
    """Permissions of a server's clients, given by its operator.

    Attributes:
        folders: folders on the server's disk (`--models`); what they contain may be read.
        addresses: patterns of other addresses (`--allow-weights`) such as `hf://meta-llama/*`; `*` stands for any characters, and
            before the first `/` of what follows `://` (a host, a bucket, an organization) for any but `/`.
        saving: folders that the tenant may save weights in, and read (`--save-weights`).
        hidden: folders of the server with files of all tenants. Clients may read only the part that is in `saving`.
        suffixes: ends of the names of files with weights, by the formats in use, and of their indexes: a source offers these of a folder.
    """

    folders: tuple[Path, ...] = ()
    addresses: tuple[str, ...] = ()
    saving: tuple[Path, ...] = ()
    hidden: tuple[Path, ...] = ()
    suffixes: tuple[str, ...] = (".safetensors", INDEX)


@runtime_checkable
class WeightFile(Protocol):
    """A file with weights, opened for reading. It is read by several threads at the same time, and closed when it is collected.

    Attributes:
        name: its name in its folder, such as `model-00001-of-00002.safetensors`.
        size: bytes.
    """

    name: str
    size: int

    def version(self) -> str:
        """Another text once its contents may have changed. It is asked before and after each read, and must be quick."""

    def read_into(self, start: int, buffer: memoryview) -> None:
        """Fill `buffer` (bytes) with what begins at byte `start`.

        Raises:
            OSError: that cannot be read.
        """


@runtime_checkable
class MappableFile(WeightFile, Protocol):
    """A weight file that nothing writes into or cuts off, and that the system can map into memory.

    An executor whose device computes in the host's memory takes tensors from the mapping instead of copies: a mapped file that
    became shorter would end the process that looks into it.
    """

    def map(self) -> Buffer:
        """All bytes of the file, writable; what is written stays with this process. They are mapped as long as anything refers to them.

        Raises:
            OSError: it cannot be mapped; it is read instead.
        """


@attrs.frozen
class LocalPlace:
    """A path on the server's disk.

    Attributes:
        path: a file, or a folder with the files of one model.
        immutable: True if files are replaced as a whole, never written or truncated in place. The executor may map them into memory.
    """

    path: Path
    immutable: bool = False


@runtime_checkable
class WeightSource(Protocol):
    """Resolve addresses of one scheme to places. `name` is the scheme, such as `hf` for `hf://org/model`.

    A source opens no file on the server's disk. The executor checks each place against the operator's permissions and opens it.
    """

    name: str

    def places(self, address: str, folders: Sequence[Path]) -> Sequence[LocalPlace | str]:
        """Return candidate places of an address in the order in which the executor tries them.

        The executor skips places that clients may not read. It passes network addresses to `NetworkSource.open`.

        Args:
            address: has no segment `..`, whatever separates segments, no control character, no backslash and no percent escape.
            folders: folders that clients may read. A relative address is relative to each of them.

        Raises:
            WeightsUnavailable: the address does not have the form that this source requires.
        """


@runtime_checkable
class NetworkSource(WeightSource, Protocol):
    """A weight source whose places include network addresses."""

    def open(self, address: str, permissions: WeightPermissions) -> Sequence[WeightFile]:
        """Open a network address that clients may read. Return one file, or the weight files and indexes of a folder.

        Args:
            address: an element of the result of `places`.
            permissions: call `allows` before you request another address, such as a redirect or a shard.

        Raises:
            WeightsUnavailable: the address has no file, or the file cannot be read.
        """


ReportDownload = Callable[[int, int], None]
"""Called with the bytes that are there and those that are expected. It raises `WeightsUnavailable` where no client waits any more."""


@runtime_checkable
class DownloadingSource(WeightSource, Protocol):
    """A weight source that downloads network addresses and reports the progress to clients."""

    def download(self, address: str, permissions: WeightPermissions, report: ReportDownload) -> Sequence[WeightFile]:
        """Download the files of an address, as `NetworkSource.open`.

        Call `report` from any thread, at least once a second while bytes arrive. Let its exceptions end the download.
        """


class WeightSink(Protocol):
    """A file that is being written. Readers find it whole, after `commit`, or what was there before."""

    def write(self, data: memoryview) -> None:
        """Append bytes.

        Raises:
            OSError: they cannot be written.
        """

    def commit(self) -> None:
        """Put the file in its place, so that it outlives a loss of power.

        Raises:
            OSError: that cannot be done; what was there before still is.
        """

    def discard(self) -> None:
        """Give up a file that was not committed; nothing is left of it."""


@runtime_checkable
class WritableSource(WeightSource, Protocol):
    """A weight source that clients can save to. The executor checks that the client may write the path before each call."""

    def create(self, path: Path, size: int) -> WeightSink:
        """Begin to write a file of `size` bytes.

        Raises:
            WeightsUnavailable: the file cannot be written.
        """

    def remove(self, path: Path, folders: Sequence[Path]) -> None:
        """Remove a file and its empty parent folders, but no folder in `folders`.

        Raises:
            WeightsUnavailable: the file does not exist (the cause is a `FileNotFoundError`) or cannot be removed.
        """


@hookspec
def djinn_register_weight_sources(settings: Any) -> Iterable[WeightSource]:
    """Return the weight sources that this plugin offers.

    Called once in each executor process. `file:` is built in. An address whose scheme has no source is refused with the
    schemes that there are. An exception disables the plugin. Since API version 1.
    """
    del settings
    raise NotImplementedError
