"""Messages about weights that an executor reads or writes itself, at an address from the client."""

from typing import Annotated

import msgspec

from djinn_core.wire import limits
from djinn_core.wire.binding_delta import Handles
from djinn_core.wire.message_base import Count, Digest, Dimensions, Message, Name, PrintableFields, Seconds

TensorName = Annotated[str, msgspec.Meta(max_length=limits.STORED_NAME)]
# Fine-tuned weights may have long training descriptions, limited only by the frame size.
MetadataText = Annotated[str, msgspec.Meta(max_length=limits.HEAD_BYTES)]
WeightAddress = Annotated[str, msgspec.Meta(max_length=limits.STORED_ADDRESS)]


class StoredTensorEntry(msgspec.Struct, frozen=True, array_like=True):
    """A tensor in an opened file: its name, dtype and shape."""

    name: TensorName
    dtype: Name
    shape: Dimensions


class OpenWeights(Message, frozen=True):
    """Request the list of tensors at an address. The reply is `OpenWeightsReply`.

    Attributes:
        patience: seconds after which the executor replies even if the address is not open yet; 0 for no limit.
    """

    address: WeightAddress
    patience: Seconds = 0.0


class OpenWeightsReply(PrintableFields, Message, frozen=True):
    """Reply to `OpenWeights`: the tensors, and the version of their files.

    Attributes:
        refused: reason of a refusal.
        address: exact address of these files; empty if it is the requested address.
        unfinished: True if the address is not open yet. The client asks again.
        done: downloaded bytes so far, if unfinished.
        expected: bytes to download in total, if unfinished.
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
    """Ask for the small files in the folder at an address: configurations and tokenizers.

    The reply is `SmallFilesReply`.
    """

    address: WeightAddress


class SmallFilesReply(PrintableFields, Message, frozen=True):
    """Reply to `SmallFilesRequest`: the files.

    Attributes:
        refused: reason why there are no files.
    """

    texts = ("refused",)

    files: Annotated[tuple[SmallFile, ...], msgspec.Meta(max_length=limits.SMALL_FILES)] = ()
    refused: str = ""


class ReadProgressRequest(Message, frozen=True):
    """Request the progress of earlier `ReadWeights`.

    The executor replies when it has read all bytes, or after `patience` seconds.
    """

    patience: Seconds = 0.0


class ReadProgressReply(Message, frozen=True):
    """Reply to `ReadProgressRequest`: remaining bytes to read."""

    left: Count


class ReadWeights(Message, frozen=True):
    """Create a contiguous value that the executor reads: `size` bytes from byte `start` of a tensor at an opened address.

    There is no reply. If the files have another version or cannot be read, the value becomes poison.
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
    """Write values to a safetensors file at an address, under these names. The reply is `SaveWeightsReply`.

    Attributes:
        seconds: lifetime at an address `published:`; 0 for as long as the executor allows.
    """

    address: WeightAddress
    names: Annotated[tuple[TensorName, ...], msgspec.Meta(max_length=limits.STORED_TENSORS)] = ()
    handles: Handles = ()
    metadata: tuple[tuple[MetadataText, MetadataText], ...] = ()
    seconds: Seconds = 0.0


class SaveWeightsReply(PrintableFields, Message, frozen=True):
    """Reply to `SaveWeights`: the bytes of the file.

    Attributes:
        refused: reason of a refusal.
        poisoned: name of a value whose op failed, if that is the reason. Fetching it raises the error.
    """

    texts = ("refused",)

    nbytes: Count
    refused: str = ""
    poisoned: TensorName = ""


class PublishedEntry(msgspec.Struct, frozen=True, array_like=True):
    """A published file: its name, its bytes, its age in seconds, and the seconds until it expires."""

    name: Name
    nbytes: Count
    age: Seconds
    left: Seconds


class PublishedRequest(Message, frozen=True):
    """Request the list of files that the tenant has published. The reply is `PublishedReply`."""


class PublishedReply(PrintableFields, Message, frozen=True):
    """Reply to `PublishedRequest`: the files.

    Attributes:
        refused: reason why the executor publishes nothing.
    """

    texts = ("refused",)

    entries: tuple[PublishedEntry, ...] = ()
    refused: str = ""


class RemoveWeights(Message, frozen=True):
    """Remove a saved file or a published name. The reply is `RemoveWeightsReply`."""

    address: WeightAddress


class RemoveWeightsReply(PrintableFields, Message, frozen=True):
    """Reply to `RemoveWeights`.

    Attributes:
        refused: reason why the file was not removed.
    """

    texts = ("refused",)

    refused: str = ""
