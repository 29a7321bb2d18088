"""Models of transformers whose weights the server reads: `from_pretrained(..., device_map="remote_accelerator:0")`.

The client loads configuration and tokenizer. Before transformers searches the checkpoint's files, the adapter asks the server to
open them. transformers then reads the server's tensors as it reads a safetensors file.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from djinn.hooks import rebind
from djinn.weights import RemoteWeights, open_weights
from djinn_client.interception.tensors.lazy_tensor import logical_device
from djinn_integrations import is_the_only_accelerator
from djinn_integrations.hf_transformers.server_folders import address_of
from djinn_integrations.weights.open_weights import hub_address, server_weights, whole_device
from djinn_integrations.weights.server_files import saved_at


class _ServerCheckpoint(str):
    """Path of a checkpoint on the server, which transformers passes from its search to its reader. `weights`: its tensors."""

    __slots__ = ("weights",)
    weights: RemoteWeights


def _checkpoint(path: str, weights: RemoteWeights) -> _ServerCheckpoint:
    checkpoint = _ServerCheckpoint(path)
    checkpoint.weights = weights
    return checkpoint


def adapt_loading(module: Any) -> None:
    """Adapt `transformers.modeling_utils`: `from_pretrained` onto the remote device finds checkpoints on the server."""
    loading: ContextVar[torch.device | None] = ContextVar("loading", default=None)
    module.PreTrainedModel.from_pretrained = classmethod(
        _noting_device(module.PreTrainedModel.from_pretrained, loading)
    )
    module._get_resolved_checkpoint_files = _asking_server(module._get_resolved_checkpoint_files, loading)
    open_file = module.safe_open

    @functools.wraps(open_file, updated=())
    def safe_open(filename: Any, *args: Any, **options: Any) -> Any:
        return filename.weights if isinstance(filename, _ServerCheckpoint) else open_file(filename, *args, **options)

    module.safe_open = safe_open


def adapt_pipelines(module: Any) -> None:
    """Adapt `transformers.pipelines`: a pipeline loads its model directly onto the remote device."""
    plain = module.pipeline
    signature = inspect.signature(plain)

    @functools.wraps(plain)
    def pipeline(*args: Any, **options: Any) -> Any:
        arguments = signature.bind(*args, **options).arguments
        has_device_map = arguments.get("device_map") is not None or "device_map" in (
            arguments.get("model_kwargs") or {}
        )
        target = (
            _selected_device(arguments.get("device"))
            if isinstance(arguments.get("model"), str) and not has_device_map
            else None
        )
        if target is None:
            return plain(*args, **options)
        others = arguments.pop("kwargs", {})
        return plain(**arguments | {"device": None, "device_map": target}, **others)

    rebind(plain, pipeline, ("transformers",))


def _selected_device(device: Any) -> torch.device | None:
    """Return the remote device that a pipeline's argument `device` selects, or None for other devices."""
    if find_spec("accelerate") is None:  # transformers requires it for a device map
        return None
    if device is None or isinstance(device, int):
        index = device or 0
        return logical_device(index) if index >= 0 and is_the_only_accelerator() else None
    return whole_device(device)


def _noting_device(from_pretrained: Any, loading: ContextVar[torch.device | None]) -> Callable[..., Any]:
    @functools.wraps(from_pretrained.__func__)
    def noting(cls: Any, *args: Any, device_map: Any = None, **options: Any) -> Any:
        before = loading.set(whole_device(device_map))
        try:
            return from_pretrained.__func__(cls, *args, device_map=device_map, **options)
        finally:
            loading.reset(before)

    return noting


def _asking_server(resolve: Callable[..., Any], loading: ContextVar[torch.device | None]) -> Callable[..., Any]:
    @functools.wraps(resolve)
    def asking(*args: Any, **options: Any) -> Any:
        device = loading.get()
        address = None if device is None or args else _address(**options)
        weights = server_weights(address, device) if address is not None and device is not None else None
        if weights is not None:
            return [_checkpoint(f"{weights.address}/model.safetensors", weights)], None
        files, others = resolve(*args, **options)
        if device is not None and files:  # files that `save_pretrained` had the server write
            addresses = [saved_at(file) for file in files]
            opened_weights = [None if address is None else open_weights(address, device) for address in addresses]
            files = [
                _checkpoint(f, one) if one is not None else f for f, one in zip(files, opened_weights, strict=True)
            ]
        return files, others

    return asking


def _address(
    pretrained_model_name_or_path: Any = None,
    variant: str | None = None,
    gguf_file: str | None = None,
    use_safetensors: bool | None = None,
    transformers_explicit_filename: str | None = None,
    download_kwargs: Mapping[str, Any] | None = None,
    **_: Any,
) -> str | None:
    """Return the server address of a hub model or of a server folder, or None for other models and unusual file names.

    The arguments are those of transformers' `_get_resolved_checkpoint_files`.
    """
    options = download_kwargs or {}
    name = str(pretrained_model_name_or_path)
    unusual = variant or gguf_file or use_safetensors is False or transformers_explicit_filename
    if pretrained_model_name_or_path is None or unusual or options.get("force_download"):
        return None
    folder = options.get("subfolder") or ""
    if address := address_of(name):
        return f"{address}/{folder}" if folder else address
    if Path(name).exists():
        return hub_address(Path(name) / folder)
    return f"hf://{name}@{options.get('revision') or 'main'}" + (f"/{folder}" if folder else "")
