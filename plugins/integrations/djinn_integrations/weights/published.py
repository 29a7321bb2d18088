"""Weights under names that outlive programs: `publish`, `attach`, `published`, `unpublish` of `djinn.weights`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import attrs
import torch

from djinn_core.errors import ConfigurationError
from djinn_core.wire.weight_messages import PublishedReply, PublishedRequest
from djinn_integrations.weights.open_weights import (
    RemoteWeights,
    index_of,
    open_weights,
    query,
    remove_weights,
    write_weights,
)

_SCHEME: Final = "published:"


@attrs.frozen
class Publication:
    """Weights that are published under a name.

    Attributes:
        name: the name.
        nbytes: bytes of the file on the server's disk.
        age: seconds since the publication, at the time of the query.
        seconds_left: seconds until the name expires, at the time of the query.
    """

    name: str
    nbytes: int
    age: float
    seconds_left: float


def publish(
    name: str, tensors: Mapping[str, Any], ttl: float | None = None, metadata: Mapping[str, str] | None = None
) -> int:
    """Publish copies of tensors under a name. The server keeps them after this program has ended.

    No tensor is fetched. All clients of the tenant can attach the name. An earlier publication of the name is replaced when
    all tensors are stored.

    Args:
        name: letters, digits, `.`, `_` and `-`.
        tensors: strided tensors by name, such as a state dict. Names in nested dictionaries are joined by dots. CPU
            tensors are uploaded.
        ttl: seconds after which the name expires, or None for the server's maximum.
        metadata: texts to store with the tensors.

    Returns:
        Bytes of the file on the server's disk.

    Raises:
        WeightsUnavailable: the server refuses the name or the ttl, or the tenant has reached its quota.
        ConfigurationError: `ttl` is not above 0, a value is not a tensor, a tensor's name is invalid or not unique, or the
            tensors are on no remote device or on several.
        UnsupportedOperation: a tensor cannot be stored in a safetensors file.
        RemoteError: a tensor could not be computed.
        SessionLost: the remote state is lost.
    """
    if ttl is not None and not 0 < ttl < 1e12:
        raise ConfigurationError(f"`ttl` must be a number of seconds above 0, not {ttl!r}")
    tensor_by_name: dict[str, torch.Tensor] = {}
    for key, tensor in _flattened(tensors, ""):
        if key in tensor_by_name:
            raise ConfigurationError(
                f"two tensors have the name {key!r} after the keys of nested dictionaries are joined by dots: rename one"
            )
        tensor_by_name[key] = tensor
    return write_weights(tensor_by_name, _SCHEME + name, metadata or {}, ttl or 0.0)


def attach(name: str, device: torch.device | str | int = 0) -> RemoteWeights:
    """Return the tensors that a program of the tenant published under a name.

    Later publications under the name do not change these tensors, and writes to these tensors do not change the
    publication.

    Raises:
        WeightsUnavailable: the name does not exist, or it has expired.
        ConfigurationError: `device` is not a remote device.
        SessionLost: the remote state is gone.
    """
    return open_weights(_SCHEME + name, device)


def published(device: torch.device | str | int = 0) -> dict[str, Publication]:
    """Return all publications of the tenant's clients on the device's server, by name.

    Raises:
        WeightsUnavailable: the server keeps no published weights.
        ConfigurationError: `device` is not a remote device.
        SessionLost: the remote state is gone.
    """
    reply = query(PublishedRequest(), PublishedReply, index_of(device))
    return {one.name: Publication(one.name, one.nbytes, one.age, one.left) for one in reply.entries}


def unpublish(name: str, device: torch.device | str | int = 0) -> None:
    """Remove a published name. Tensors that programs have already read from it stay valid.

    Raises:
        WeightsUnavailable: the name does not exist.
        ConfigurationError: `device` is not a remote device.
        SessionLost: the remote state is gone.
    """
    remove_weights(_SCHEME + name, device)


def _flattened(tensors: Mapping[Any, Any], before: str) -> Iterator[tuple[str, torch.Tensor]]:
    for key, value in tensors.items():
        if not isinstance(key, str | int):
            raise ConfigurationError(f"a tensor's name must be a string or an integer, not {key!r}")
        name = f"{before}{key}"
        if isinstance(value, Mapping):
            yield from _flattened(value, f"{name}.")
        elif isinstance(value, torch.Tensor):
            yield name, value
        else:
            raise ConfigurationError(
                f"only tensors can be published, and {name!r} is of type {type(value).__name__}: remove it, convert "
                "it to a tensor, or pass it as text in `metadata`"
            )
