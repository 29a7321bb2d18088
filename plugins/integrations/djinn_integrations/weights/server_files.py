"""Server addresses as paths of `torch.save` and `torch.load`, and local pointer files to them.

Tensors are stored in a safetensors file at the address. Other parts of an object are text in its header. Loading executes no
code.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import chain
from pathlib import Path
from typing import Any, Final

import msgspec
import torch

from djinn_client.interception.tensors.batched_fetch import fetched_together
from djinn_client.interception.tensors.lazy_tensor import is_remote
from djinn_core.errors import ConfigurationError, ProtocolError, UnsupportedOperation, WeightsUnavailable
from djinn_core.wire.tensors import dtype_from_name, dtype_name

_ADDRESS: Final = re.compile(r"file:|published:|[a-z][a-z0-9+.-]*://")
_POINTER: Final = b"This file is on the server of a djinn client, at the address "
_POINTER_LIMIT: Final = 1 << 15
_SUFFIX: Final = ".safetensors"
_STRUCTURE: Final = "djinn.object"  # key in the metadata of a file
_PLAIN: Final = (bool, int, float, str)
_staying: Final[ContextVar[torch.device | None]] = ContextVar("staying", default=None)


def address_in(path: object) -> str | None:
    """Return `path` as text if it is a server address, such as `file:run-7/model.safetensors`, or None for other paths."""
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    return text if isinstance(text, str) and _ADDRESS.match(text) else None


def saved_at(path: object) -> str | None:
    """Return the server address of a file that was saved at `path`: its pointer file's address, or `path` itself.

    Return None if `path` is not a server address, or if a local file of this name is no pointer file.
    """
    address = address_in(path)
    if address is None:
        return None
    try:
        with Path(address).open("rb") as file:
            text = file.read(_POINTER_LIMIT)
    except OSError:
        return address
    return text.removeprefix(_POINTER).decode().strip() if text.startswith(_POINTER) else None


def write_pointer_file(path: str, address: str) -> None:
    """Write a local file at `path` with the address of its contents, because libraries check that saved files exist.

    If its folder does not exist, write nothing.
    """
    if Path(path).parent.is_dir() and Path(path).parent != Path():
        Path(path).write_bytes(_POINTER + address.encode() + b"\n")


@contextmanager
def loading_stays_on(device: torch.device) -> Iterator[None]:
    """Inside the block, objects that libraries load from server addresses to the CPU are loaded to `device` instead.

    Otherwise, libraries would fetch their tensors and send them back to the device.
    """
    before = _staying.set(device)
    try:
        yield
    finally:
        _staying.reset(before)


def place_of(device: torch.device | str | int | None) -> torch.device | None:
    """Return the remote device for the tensors of a load to `device`, or None if they must be fetched to the client."""
    target = _staying.get() or torch.device("cpu" if device is None else device)
    return target if is_remote(target) else None


def save_at_addresses() -> None:
    """Make `torch.save` and `torch.load` accept server addresses."""
    torch.save = torch.serialization.save = _saving(torch.serialization.save)
    torch.load = torch.serialization.load = _loading(torch.serialization.load)


def _saving(save: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(save)
    def saved(obj: object, f: Any, *args: Any, **options: Any) -> Any:
        address = address_in(f)
        if address is None:
            return save(obj, f, *args, **options)
        if not _on_server(obj):
            if address.startswith("file:"):
                Path(address).parent.mkdir(parents=True, exist_ok=True)
            return save(obj, f, *args, **options)
        tree = _Encoder()
        structure = json.dumps(tree.encode(obj, ""))
        from djinn_integrations.weights.open_weights import write_weights

        write_weights(tree.tensors, _file(address), {_STRUCTURE: structure, "format": "pt"})
        write_pointer_file(address, _file(address))
        return None

    return saved


def _loading(load: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(load)
    def loaded(f: Any, map_location: Any = None, *args: Any, **options: Any) -> Any:
        address = saved_at(f)
        return load(f, map_location, *args, **options) if address is None else _load(address, map_location)

    return loaded


def _load(address: str, map_location: Any) -> object:
    """Return the object that was saved at an address.

    Raises:
        WeightsUnavailable: the server cannot open the file, or `torch.save` did not write it.
        UnsupportedOperation: `map_location` is a function or a dictionary.
        ConfigurationError: `map_location` is neither a remote device nor the CPU.
    """
    try:
        device = _staying.get() or (None if map_location is None else torch.device(map_location))
    except (RuntimeError, TypeError) as error:
        raise UnsupportedOperation(
            f"torch.load of {address!r}: `map_location` must be one device or None for a server address"
        ) from error
    if device is not None and device.type != "cpu" and not is_remote(device):
        raise ConfigurationError(f"{address!r} cannot be loaded to {device}: name a remote device or the CPU")
    from djinn_integrations.weights.open_weights import open_weights

    weights = open_weights(_file(address), device if device is not None and is_remote(device) else 0)
    text = (weights.metadata() or {}).get(_STRUCTURE)
    if text is None:
        raise WeightsUnavailable(f"{address!r} was not written by torch.save: read its tensors with djinn.open_weights")
    tree = _Decoder(weights, device)
    try:
        result = tree.decode(json.loads(text))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, ProtocolError) as error:
        raise WeightsUnavailable(
            f"the header of {address!r} does not describe an object ({error!r}): save it again, or read its tensors with djinn.open_weights"
        ) from error
    return result


def _file(address: str) -> str:
    return address if address.endswith(_SUFFIX) or address.startswith("published:") else address + _SUFFIX


def _on_server(value: object) -> bool:
    """Return True if an object contains a remote tensor in nested mappings, lists and tuples.

    Raises:
        UnsupportedOperation: the object is a module, whose class cannot be stored as text.
    """
    if isinstance(value, torch.Tensor):
        return is_remote(value.device)
    if isinstance(value, torch.nn.Module):
        if not any(is_remote(one.device) for one in chain(value.parameters(), value.buffers())):
            return False
        raise UnsupportedOperation("modules cannot be saved at a server address: save the module's state_dict()")
    if isinstance(value, Mapping):
        return any(map(_on_server, value.values()))
    return isinstance(value, list | tuple) and any(map(_on_server, value))


class _Encoder(msgspec.Struct):
    """Converts an object to JSON values, and collects its tensors. `tensors`: the tensors by the names in these values."""

    tensors: dict[str, torch.Tensor] = msgspec.field(default_factory=dict)
    _paths_by_id: dict[int, str] = msgspec.field(default_factory=dict)

    def encode(self, value: Any, path: str) -> Any:
        """Return a value as JSON values. `path`: path of the value in the object, such as `state.0.step`.

        Raises:
            UnsupportedOperation: the value cannot be converted.
        """
        kind = type(value)
        if value is None or kind in _PLAIN:
            return value
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        if kind in {list, tuple, torch.Size}:
            inner = [self.encode(one, _member_path(path, n)) for n, one in enumerate(value)]
            return inner if kind is list else {"tuple": inner}
        if kind in {dict, OrderedDict}:
            if any(key is not None and type(key) not in _PLAIN for key in value):
                raise UnsupportedOperation(
                    f"{path or 'the object'!r} has keys that are neither strings nor numbers, which torch.save needs at a server address: convert the keys, or save locally"
                )
            pairs = [[key, self.encode(one, _member_path(path, key))] for key, one in value.items()]
            return {"dict" if kind is dict else "ordered": pairs}
        if isinstance(value, torch.dtype):
            return {"dtype": dtype_name(value)}
        if isinstance(value, torch.device):
            return {"device": str(value)}
        raise UnsupportedOperation(
            f"{path or 'the object'!r} is of type {kind.__name__}: at a server address, torch.save supports "
            "tensors, dictionaries, lists, tuples, strings and numbers. Save it locally, or remove it from the object"
        )

    def _tensor(self, value: torch.Tensor, path: str) -> dict[str, Any]:
        name = self._paths_by_id.get(id(value))
        if name is None:
            name = path or "tensor"
            while name in self.tensors:
                name += "'"
            self._paths_by_id[id(value)] = name
            self.tensors[name] = value
        description: dict[str, Any] = {"tensor": name}
        if not is_remote(value.device):
            description["cpu"] = True
        if isinstance(value, torch.nn.Parameter):
            description["parameter"] = value.requires_grad
        return description


class _Decoder(msgspec.Struct):
    _opened: Mapping[str, torch.Tensor]
    _device: torch.device | None  # None: the saved devices
    _fetched: dict[str, torch.Tensor] = msgspec.field(default_factory=dict)
    _tensors_by_path: dict[str, torch.Tensor] = msgspec.field(default_factory=dict)

    def decode(self, text: Any) -> Any:
        """Return the object that JSON values describe. Tensors for the client are fetched in one round trip."""
        here: list[str] = []
        self._find(text, here)
        tensors = {name: self._opened[name] for name in dict.fromkeys(here)}
        with fetched_together(tensors.values()):
            self._fetched = {name: tensor.cpu() for name, tensor in tensors.items()}
        return self._decode(text)

    def _find(self, text: Any, here: list[str]) -> None:
        if isinstance(text, dict) and "tensor" in text:
            if text.get("cpu") or (self._device is not None and self._device.type == "cpu"):
                here.append(text["tensor"])
        elif isinstance(text, dict | list):
            for inner in text.values() if isinstance(text, dict) else text:
                self._find(inner, here)

    def _decode(self, text: Any) -> Any:
        if isinstance(text, list):
            return [self._decode(one) for one in text]
        if not isinstance(text, dict):
            return text
        if "tensor" in text:
            return self._tensor(text)
        ((kind, inner),) = text.items()
        if kind == "tuple":
            return tuple([self._decode(one) for one in inner])
        if kind in {"dict", "ordered"}:
            pairs = [(key, self._decode(one)) for key, one in inner]
            return dict(pairs) if kind == "dict" else OrderedDict(pairs)
        if kind == "device":
            return torch.device(inner)
        if kind == "dtype":
            return dtype_from_name(inner)
        raise ValueError(f"it has an entry of the unknown kind {kind!r}")

    def _tensor(self, text: Mapping[str, Any]) -> torch.Tensor:
        name = text["tensor"]
        if name not in self._tensors_by_path:
            tensor = self._fetched[name] if name in self._fetched else self._opened[name]
            if "parameter" in text:
                tensor = torch.nn.Parameter(tensor, requires_grad=text["parameter"])
            self._tensors_by_path[name] = tensor
        return self._tensors_by_path[name]


def _member_path(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)
