"""`djinn.open_weights` and `djinn.save_weights`: tensors that the server reads and writes, bypassing the client."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import EllipsisType, TracebackType
from typing import Any, Final, Self

import torch

from djinn_client import torch_dispatch
from djinn_client.interception.deadlines import wait_deadline
from djinn_client.interception.native.install import hide_frames_of
from djinn_client.interception.recording.recorder import current
from djinn_client.interception.tap import Cause, waiting_for
from djinn_client.interception.tensors.lazy_tensor import LazyTensor, is_remote, logical_device, wrap
from djinn_client.interception.tensors.storage import Storage, Value
from djinn_client.runtime.client import settings
from djinn_client.runtime.context import context
from djinn_client.sink import M
from djinn_core.errors import (
    ConfigurationError,
    DeadlineExceeded,
    ProtocolError,
    UnsupportedOperation,
    WeightsUnavailable,
)
from djinn_core.ir.stored_tensor import SAFETENSORS_DTYPES, StoredTensor, WeightListing
from djinn_core.ir.values import contiguous_strides, tensor_meta
from djinn_core.logs import get_logger
from djinn_core.wire import limits
from djinn_core.wire.binding_delta import pack_handles
from djinn_core.wire.message_base import Message
from djinn_core.wire.tensors import dtype_from_name
from djinn_core.wire.weight_messages import (
    OpenWeights,
    OpenWeightsReply,
    RemoveWeights,
    RemoveWeightsReply,
    SaveWeights,
    SaveWeightsReply,
)

hide_frames_of(__name__)
_log = get_logger("djinn.runtime")
# Seconds for which the executor may delay a reply about an address that it is opening. Other threads wait meanwhile.
_FIRST_PATIENCE: Final = 0.05  # a local file is open within this time
_PATIENCE: Final = 0.001
_PAUSE_SECONDS: Final = 0.1  # seconds between two queries
_DTYPE_NAMES: Final = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}


class WeightSlice:
    """A stored tensor that the server reads only when it is indexed. It has the methods of safetensors' slices."""

    def __init__(self, stored: StoredTensor, device: int) -> None:
        self._stored_tensor = stored
        self._device = device

    def get_shape(self) -> list[int]:
        """Return the shape of the whole tensor."""
        return list(self._stored_tensor.shape)

    def get_dtype(self) -> str:
        """Return the dtype's name in safetensors files, such as `BF16`, or PyTorch's name if it has none."""
        dtype = self._stored_tensor.dtype
        return _DTYPE_NAMES.get(dtype) or str(dtype).removeprefix("torch.")

    @property
    def shape(self) -> torch.Size:
        """Return the shape of the whole tensor."""
        return torch.Size(self._stored_tensor.shape)

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the stored tensor."""
        return self._stored_tensor.dtype

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Return the indexed part as a new remote tensor. For a slice with step 1, the server reads only these rows."""
        first = index[0] if isinstance(index, tuple) and index else index
        rows = self._stored_tensor.shape[0] if self._stored_tensor.shape else 0
        if isinstance(first, slice) and self._stored_tensor.shape:
            start, stop, step = first.indices(rows)
            if step == 1:
                tensor: torch.Tensor = _read_stored(self._stored_tensor.rows(start, max(start, stop)), self._device)
                return tensor[(slice(None), *index[1:])] if isinstance(index, tuple) else tensor
        whole = _read_stored(self._stored_tensor, self._device)
        return whole if isinstance(index, EllipsisType) else whole[index]


class RemoteWeights(Mapping[str, torch.Tensor]):
    """The tensors at a server address, by name.

    A look-up makes the server read the stored tensor into a new tensor, and does not wait. If the files cannot be read, or
    have changed since they were opened, ops on the tensor raise `RemoteError`. The object has the interface of
    safetensors' `safe_open`, and works as a state dict.

    Attributes:
        address: the address.
    """

    __eq__ = object.__eq__  # a mapping's equality would compare tensors
    __hash__ = object.__hash__

    def __init__(self, address: str, listing: WeightListing, device: int) -> None:
        self.address = address
        self._listing = listing
        self._device = device

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return a new tensor with the contents of the tensor called `name`.

        Raises:
            KeyError: the tensor does not exist.
            WeightsUnavailable: the tensor's storage format is not supported.
        """
        return _read_stored(self._stored_tensor(name), self._device)

    def __iter__(self) -> Iterator[str]:
        # Unreadable tensors are included: an error is better than a state dict that silently lacks tensors.
        yield from self._listing.tensors
        yield from self._listing.unreadable

    def __len__(self) -> int:
        return len(self._listing.tensors) + len(self._listing.unreadable)

    def __contains__(self, name: object) -> bool:
        return name in self._listing.tensors or name in self._listing.unreadable

    def _stored_tensor(self, name: str) -> StoredTensor:
        if name in self._listing.unreadable:
            kind = self._listing.unreadable[name]
            raise WeightsUnavailable(
                f"the tensor {name!r} at {self.address!r} is stored as {kind}, which this version of Djinn cannot read: convert the file"
            )
        return self._listing.tensors[name]

    def __repr__(self) -> str:
        return f"RemoteWeights({self.address!r}, {len(self)} tensors, {self.nbytes:,} bytes)"

    @property
    def nbytes(self) -> int:
        """Return the total bytes of all readable tensors."""
        return sum(stored.nbytes for stored in self._listing.tensors.values())

    def get_tensor(self, name: str) -> torch.Tensor:
        """Return a new tensor, as `weights[name]` does."""
        return self[name]

    def get_tensors(self) -> dict[str, torch.Tensor]:
        """Return new tensors for all names."""
        return dict(self)

    def get_slice(self, name: str) -> WeightSlice:
        """Return the tensor called `name` for reading parts of it.

        Raises:
            KeyError: the tensor does not exist.
            WeightsUnavailable: the tensor's storage format is not supported.
        """
        return WeightSlice(self._stored_tensor(name), self._device)

    def offset_keys(self) -> list[str]:
        """Return the names of the tensors in the order of the files."""
        return list(self)

    def metadata(self) -> dict[str, str] | None:
        """Return the metadata of the files, or None if they have none."""
        return dict(self._listing.metadata) or None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Do nothing: the server owns the opened files."""


def open_weights(address: str, device: torch.device | str | int = 0) -> RemoteWeights:
    """Open weights that the server reads itself. Only names, dtypes and shapes are sent to the client.

    Args:
        address: a file or a folder that the server may read: `file:PATH`, `hf://organisation/model@revision/file`, or an address
            of a plugin. If a folder has an index file, the index names its files.
        device: the remote device for the tensors, or its index.

    Raises:
        WeightsUnavailable: the file does not exist, is malformed, or the server may not read it.
        ConfigurationError: `device` is not a remote device.
        SessionLost: the remote state is lost.
        DeadlineExceeded: the server must download the files, and the time of `djinn.deadline` or `wait_timeout` is over.
    """
    index = index_of(device)
    return RemoteWeights(address, _listing(address, index), index)


def _listing(address: str, index: int) -> WeightListing:
    """Return the list of the tensors at an address. Wait until the server has downloaded missing files.

    Other threads of the program continue meanwhile.
    """
    until, patience = wait_deadline(), _FIRST_PATIENCE
    while True:
        try:
            reply = query(OpenWeights(checked(address), patience), OpenWeightsReply, index)
        except DeadlineExceeded as error:
            raise _not_opened(address) from error
        patience = _PATIENCE
        if not reply.unfinished:
            return _listing_of(address, reply)
        context.observers.emit("downloading", address=address, done=reply.done, expected=reply.expected)
        if until is not None and time.monotonic() >= until:
            raise _not_opened(address)
        time.sleep(_PAUSE_SECONDS)


def _not_opened(address: str) -> DeadlineExceeded:
    return DeadlineExceeded(
        f"the server did not open {address!r} before the deadline (djinn.deadline, or the setting wait_timeout). "
        "The server continues to download for a while: open it again"
    )


def _listing_of(address: str, reply: OpenWeightsReply) -> WeightListing:
    listing = WeightListing({}, dict(reply.metadata))
    for one in reply.tensors:
        try:
            dtype = dtype_from_name(one.dtype)
        except ProtocolError:  # a quantized format, or a dtype of a later PyTorch
            listing.unreadable[one.name] = one.dtype
        else:
            there = reply.address or address
            listing.tensors[one.name] = StoredTensor(there, reply.version, one.name, dtype, one.shape)
    return listing


def query(message: Message, kind: type[M], device: int) -> M:
    """Send a message about weights to the executor of a logical device, after all recorded work. Return the reply.

    `kind`: class of the reply.

    Raises:
        WeightsUnavailable: the server refuses.
        SessionLost: the remote state is gone.
    """
    with waiting_for(Cause.FILES):
        reply = current().query(message, kind, device)
    if (reason := getattr(reply, "refused", "")) and not getattr(reply, "poisoned", ""):
        raise WeightsUnavailable(reason)
    return reply


def checked(address: str) -> str:
    """Check an address and return it.

    Raises:
        WeightsUnavailable: the address is invalid.
    """
    if len(address) > limits.STORED_ADDRESS:
        raise WeightsUnavailable(
            f"the address of weights has {len(address):,} characters: use at most {limits.STORED_ADDRESS}"
        )
    if not _is_text(address):
        raise WeightsUnavailable(f"the address of weights {address!r} has a lone surrogate: use valid Unicode text")
    return address


def index_of(device: torch.device | str | int) -> int:
    """Return the index of a remote device.

    Raises:
        ConfigurationError: the device is not remote.
    """
    if isinstance(device, int):
        return device
    torch_device = torch.device(device)
    if not is_remote(torch_device):
        raise ConfigurationError(
            f"weights cannot be opened on {torch_device}: name a remote device, such as remote_accelerator:0"
        )
    return torch_device.index or 0


def save_weights(tensors: Mapping[str, torch.Tensor], address: str, metadata: Mapping[str, str] | None = None) -> int:
    """Make the server save tensors in a safetensors file. Return the bytes of the file.

    No tensor data leaves the server. The file is replaced atomically. Each tensor is written separately, even if tensors
    share memory.

    Args:
        tensors: strided tensors by name, such as a state dict. CPU tensors are uploaded.
        address: `file:PATH.safetensors`, or an address of a plugin. A relative path is relative to the tenant's folder.
        metadata: metadata of the file.

    Raises:
        WeightsUnavailable: the server may not or cannot write to the address, or there are too many or too long names.
        ConfigurationError: no tensor is on a remote device, or tensors are on several remote devices.
        UnsupportedOperation: a tensor's subclass contains several tensors.
        OutOfMemoryError: the tensors are on several executors of a pool, and do not fit on one.
        RemoteError: a tensor could not be computed.
        SessionLost: the remote state is gone.
    """
    return write_weights(tensors, address, metadata or {})


def write_weights(
    tensors: Mapping[str, torch.Tensor], address: str, metadata: Mapping[str, str], seconds: float = 0.0
) -> int:
    """Write weights, as `save_weights` does. Published weights expire after `seconds`."""
    devices = {tensor.device for tensor in tensors.values() if is_remote(tensor.device)}
    if len(devices) != 1:
        names = ", ".join(sorted(map(str, devices))) or "none"
        raise ConfigurationError(
            f"tensors are saved by the one remote device that has them, and these are on {names}: move them to one remote device"
        )
    (device,) = devices
    remote_tensors: dict[str, LazyTensor] = {}
    for name, tensor in tensors.items():
        there = tensor if tensor.device == device else tensor.detach().to(device)
        if not isinstance(there, LazyTensor):
            raise UnsupportedOperation(
                f"{name!r} is a {type(there).__name__}, which a safetensors file cannot store: convert it to a strided tensor"
            )
        remote_tensors[name] = there
    recorder = current()
    for one in remote_tensors.values():
        recorder.order_after(one.remote.storage)
    if len(remote_tensors) > limits.STORED_TENSORS or any(len(name) > limits.STORED_NAME for name in remote_tensors):
        raise WeightsUnavailable(
            f"the tensors cannot be saved in one file: save at most {limits.STORED_TENSORS:,} tensors, with names of at most "
            f"{limits.STORED_NAME:,} characters"
        )
    handles = pack_handles([one.remote.handle for one in remote_tensors.values()])
    message = SaveWeights(checked(address), tuple(remote_tensors), handles, tuple(metadata.items()), seconds)
    try:
        outcome = query(message, SaveWeightsReply, 0)
    except UnsupportedOperation:
        if device.index:
            raise
        # The tensors are on several executors of a pool. Copy all to the first executor, directly from the others.
        copies_on_one_executor = {name: one.detach().to(logical_device(1)) for name, one in remote_tensors.items()}
        return write_weights(copies_on_one_executor, address, metadata, seconds)
    if outcome.poisoned:
        remote_tensors[outcome.poisoned].cpu()  # raises the op's error
        raise WeightsUnavailable(f"the tensor {outcome.poisoned!r} could not be computed, so nothing was saved")
    return outcome.nbytes


def remove_weights(address: str, device: torch.device | str | int = 0) -> None:
    """Remove a file that was saved on the server. Programs keep the tensors that they have read.

    Args:
        address: as for `save_weights`.
        device: a remote device of the server, or its index.

    Raises:
        WeightsUnavailable: the file does not exist, or it may not or cannot be removed.
        ConfigurationError: `device` is not a remote device.
        SessionLost: the remote state is gone.
    """
    query(RemoveWeights(checked(address)), RemoveWeightsReply, index_of(device))


def hub_address(path: Path) -> str | None:
    """Return the address of a folder in the hub's local cache, with model and commit, or None for other folders."""
    parts = path.absolute().parts
    for at in range(len(parts) - 3, -1, -1):
        if parts[at].startswith("models--") and parts[at + 1] == "snapshots":
            name = parts[at].removeprefix("models--").replace("--", "/")
            return "/".join((f"hf://{name}@{parts[at + 2]}", *parts[at + 3 :]))
    return None


def whole_device(device_map: Any) -> torch.device | None:
    """Return the remote device that a library's `device_map` assigns the whole model to, or None."""
    places = list(device_map.values()) if isinstance(device_map, Mapping) else [device_map]
    if places == [None]:
        places = [torch.get_default_device()]
    try:
        devices = {torch.device(place) for place in places}
    except (RuntimeError, TypeError):  # "auto", "disk"
        return None
    return next(iter(devices)) if len(devices) == 1 and all(map(is_remote, devices)) else None


def server_weights(address: str, device: torch.device | str | int = 0) -> RemoteWeights | None:
    """Open weights on the server, or return None if the client must load and upload them.

    The setting `weights_from` decides: `client`, `server`, or the server if it can read them.

    Raises:
        WeightsUnavailable: the server cannot read them, and the setting is `server`.
        SessionLost: the remote state is gone.
    """
    mode = settings().weights_from
    if mode == "client":
        return None
    try:
        weights = open_weights(address, device)
    except WeightsUnavailable as error:
        if mode == "server":
            raise
        _log.info(
            "the server cannot read weights, this machine loads and uploads them", address=address, reason=str(error)
        )
        return None
    _log.info("the server reads weights", address=address, tensors=len(weights), bytes=weights.nbytes)
    return weights


@torch_dispatch.without_modes
def _read_stored(stored: StoredTensor, device: int) -> LazyTensor:
    """Return a new contiguous tensor with the contents of a stored tensor, without waiting for the executor to read it."""
    meta = tensor_meta(stored.shape, contiguous_strides(stored.shape), 0, stored.dtype, device)
    value = Value.begin(Storage.begin(meta.nbytes), meta)
    current().upload(value.handle, stored, device)
    return wrap(value)


def _is_text(text: str) -> bool:
    """Return True if `text` can be encoded in a message: it has no lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
