"""Messages about weights that an executor reads or writes itself, at an address that the client names."""

from typing import Annotated

import msgspec

from djinn_core.wire import limits
from djinn_core.wire.binding_delta import Handles
from djinn_core.wire.message_base import Count, Digest, Dimensions, Message, Name, PrintableFields, Seconds

TensorName = Annotated[str, msgspec.Meta(max_length=limits.STORED_NAME)]
# Files of fine-tuned weights describe their training at length: only the frame bounds it.
MetadataText = Annotated[str, msgspec.Meta(max_length=limits.HEAD_BYTES)]
WeightAddress = Annotated[str, msgspec.Meta(max_length=limits.STORED_ADDRESS)]


class StoredTensorEntry(msgspec.Struct, frozen=True, array_like=True):
    """A tensor in an opened file: its name, dtype and shape."""

    name: TensorName
    dtype: Name
    shape: Dimensions


class OpenWeights(Message, frozen=True):
    """Ask what tensors there are at an address. Answered by `OpenWeightsReply`.

    `patience`: after so many seconds the reply may be that it is still being opened; 0: the client waits.
    """

    address: WeightAddress
    patience: Seconds = 0.0


class OpenWeightsReply(PrintableFields, Message, frozen=True):
    """Reply to `OpenWeights`: the tensors, and the version of the files that they are in. `refused` says why there are none.

    `address` names these files; empty: as the one that was asked for does. `unfinished`: it is still being opened; `done` of `expected`
    bytes were downloaded. The client asks again.
    """

    texts = ("refused",)

    version: Digest
    tensors: Annotated[tuple[StoredTensorEntry, ...], msgspec.Meta(max_length=limits.STORED_TENSORS)] = ()
    metadata: tuple[tuple[MetadataText, MetadataText], ...] = ()
    refused: str = ""
    address: WeightAddress = ""
    unfinished: bool = False
    done: Count = 0
    expected: Count = 0


class SmallFile(msgspec.Struct, frozen=True, array_like=True):
    """A small file of a folder: its name and its contents."""

    name: Name
    content: Annotated[bytes, msgspec.Meta(max_length=limits.SMALL_FILES_BYTES)]


class SmallFilesRequest(Message, frozen=True):
    """Ask for the small files in the folder at an address: configurations and tokenizers. Answered by `SmallFilesReply`."""

    address: WeightAddress


class SmallFilesReply(PrintableFields, Message, frozen=True):
    """Reply to `SmallFilesRequest`. `refused` says why there are no files."""

    texts = ("refused",)

    files: Annotated[tuple[SmallFile, ...], msgspec.Meta(max_length=limits.SMALL_FILES)] = ()
    refused: str = ""


class ReadProgressRequest(Message, frozen=True):
    """Ask how much is still to be read for `ReadWeights` that came before. Answered by `ReadProgressReply` when all is read, or after `patience`."""

    patience: Seconds = 0.0


class ReadProgressReply(Message, frozen=True):
    """Reply to `ReadProgressRequest`: bytes of the values that are still being read."""

    left: Count


class ReadWeights(Message, frozen=True):
    """A new contiguous value that the executor reads: `size` bytes from byte `start` of a tensor at an opened address.

    It has no reply. Where the files are not those of that version any more, or cannot be read, the value is poison.
    """

    handle: Count
    address: WeightAddress
    version: Digest
    name: TensorName
    dtype: Name
    shape: Dimensions
    start: Count
    size: Count


class SaveWeights(Message, frozen=True):
    """Write values to a safetensors file at an address, under these names. Answered by `SaveWeightsReply`.

    `seconds`: how long it lives at an address `published:`; 0: as long as the executor allows.
    """

    address: WeightAddress
    names: Annotated[tuple[TensorName, ...], msgspec.Meta(max_length=limits.STORED_TENSORS)] = ()
    handles: Handles = ()
    metadata: tuple[tuple[MetadataText, MetadataText], ...] = ()
    seconds: Seconds = 0.0


class SaveWeightsReply(PrintableFields, Message, frozen=True):
    """Reply to `SaveWeights`: the bytes of the file. `refused` says why there is none.

    `poisoned` is the name of a value that an op failed to compute, if that is why; fetching it says more.
    """

    texts = ("refused",)

    nbytes: Count
    refused: str = ""
    poisoned: TensorName = ""


class PublishedEntry(msgspec.Struct, frozen=True, array_like=True):
    """A published file: its name, its bytes, and the seconds since it was made and until it expires."""

    name: Name
    nbytes: Count
    age: Seconds
    left: Seconds


class PublishedRequest(Message, frozen=True):
    """Ask what the tenant has published. Answered by `PublishedReply`."""


class PublishedReply(PrintableFields, Message, frozen=True):
    """Reply to `PublishedRequest`. `refused` says why nothing is published here."""

    texts = ("refused",)

    entries: tuple[PublishedEntry, ...] = ()
    refused: str = ""


class RemoveWeights(Message, frozen=True):
    """Remove the file at an address that can be saved to, or a published name. Answered by `RemoveWeightsReply`."""

    address: WeightAddress


class RemoveWeightsReply(PrintableFields, Message, frozen=True):
    """Reply to `RemoveWeights`. `refused` says why the file is still there, or was not."""

    texts = ("refused",)

    refused: str = ""
