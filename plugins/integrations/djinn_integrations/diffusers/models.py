"""Models of diffusers whose weights the server reads: `from_pretrained(..., device_map="remote_accelerator:0")`.

The client loads the configuration. Before diffusers searches the checkpoint's files, the adapter asks the server to open them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import attrs
import torch

from djinn.hooks import rebind
from djinn.weights import RemoteWeights
from djinn_integrations.weights.open_weights import hub_address, server_weights, whole_device
from djinn_integrations.weights.server_files import loading_stays_on


class _ServerCheckpoint(str):
    """Path of a checkpoint on the server, which diffusers passes from its search to its reader. `weights`: its tensors."""

    __slots__ = ("weights",)
    weights: RemoteWeights


@attrs.define
class _LoadingModel:
    """A model that is being loaded onto `device`. `weights`: its tensors on the server, or None if the client reads them."""

    device: torch.device
    weights: RemoteWeights | None = None


def adapt_reading(module: Any) -> None:
    """Adapt `diffusers.models.model_loading_utils`: `load_state_dict` returns the server's tensors of a `_ServerCheckpoint`."""
    read = module.load_state_dict

    @functools.wraps(read)
    def load_state_dict(checkpoint_file: Any, *args: Any, **options: Any) -> Any:
        if isinstance(checkpoint_file, _ServerCheckpoint):
            return checkpoint_file.weights.get_tensors()
        return read(checkpoint_file, *args, **options)

    rebind(read, load_state_dict, ("diffusers",))


def adapt_models(module: Any) -> None:
    """Adapt `diffusers.models.modeling_utils`: `from_pretrained` onto the remote device finds checkpoints on the server."""
    loading: ContextVar[_LoadingModel | None] = ContextVar("loading", default=None)
    module.ModelMixin.from_pretrained = classmethod(_noting_device(module.ModelMixin.from_pretrained, loading))
    module._fetch_index_file = _asking_server(module._fetch_index_file, loading)
    model_file = module._get_model_file

    @functools.wraps(model_file)
    def get_model_file(*args: Any, **options: Any) -> Any:
        one = loading.get()
        if one is None or one.weights is None:
            return model_file(*args, **options)
        checkpoint = _ServerCheckpoint(f"{one.weights.address}/{options['weights_name']}")
        checkpoint.weights = one.weights
        return checkpoint

    module._get_model_file = get_model_file


def _noting_device(from_pretrained: Any, loading: ContextVar[_LoadingModel | None]) -> Callable[..., Any]:
    @functools.wraps(from_pretrained.__func__)
    def noting(cls: Any, *args: Any, **options: Any) -> Any:
        device = whole_device(options.get("device_map"))
        before = loading.set(None if device is None else _LoadingModel(device))
        try:
            with nullcontext() if device is None else loading_stays_on(device):
                return from_pretrained.__func__(cls, *args, **options)
        finally:
            loading.reset(before)

    return noting


def _asking_server(fetch_index: Callable[..., Any], loading: ContextVar[_LoadingModel | None]) -> Callable[..., Any]:
    @functools.wraps(fetch_index)
    def asking(**options: Any) -> Any:
        one = loading.get()
        address = _address(**options) if one is not None else None
        if one is not None and address is not None:
            one.weights = server_weights(address, one.device)
        return None if one is not None and one.weights is not None else fetch_index(**options)

    return asking


def _address(
    pretrained_model_name_or_path: Any = None,
    subfolder: str = "",
    variant: str | None = None,
    use_safetensors: bool | None = None,
    revision: str | None = None,
    force_download: bool = False,
    **_: Any,
) -> str | None:
    """Return the server address of a hub model, or None for other models and unusual file names.

    The arguments are those of diffusers' `_fetch_index_file`.
    """
    if variant or use_safetensors is False or force_download:
        return None
    name = Path(pretrained_model_name_or_path)
    if name.exists():
        return hub_address(name / subfolder)
    return f"hf://{name}@{revision or 'main'}" + (f"/{subfolder}" if subfolder else "")
