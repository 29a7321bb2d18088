"""Pipelines on the remote device: `from_pretrained(..., device_map="remote_accelerator:0")`, without download of the server's weights."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Final

from djinn_integrations.weights.open_weights import server_weights, whole_device

_LIBRARIES: Final = ("diffusers", "transformers")
# Suffixes of class names without weights.
_WEIGHTLESS: Final = (
    "Scheduler",
    "Tokenizer",
    "TokenizerFast",
    "FeatureExtractor",
    "Processor",
    "ProcessorFast",
    "Backend",
    "Pil",
)
_WEIGHTS: Final = ["*.safetensors", "*.bin", "*.index.json", "*.msgpack", "*.onnx", "*.onnx_data"]
_OPTIONS: Final = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "token")


def adapt_pipelines(module: Any) -> None:
    """Let pipelines of diffusers load onto the remote device, and not download weights that the server reads."""
    at_server: ContextVar[bool] = ContextVar("at_server", default=False)
    downloaded = module.snapshot_download

    @functools.wraps(downloaded)
    def snapshot_download(*args: Any, **options: Any) -> Any:
        if at_server.get():
            options["ignore_patterns"] = [*(options.get("ignore_patterns") or ()), *_WEIGHTS]
        return downloaded(*args, **options)

    module.snapshot_download = snapshot_download
    from_pretrained = module.DiffusionPipeline.from_pretrained
    module.DiffusionPipeline.from_pretrained = classmethod(
        _loading(from_pretrained, at_server, module.SUPPORTED_DEVICE_MAP)
    )


def _loading(from_pretrained: Any, at_server: ContextVar[bool], supported: list[str]) -> Callable[..., Any]:
    @functools.wraps(from_pretrained.__func__)
    def loading(cls: Any, pretrained_model_name_or_path: Any, **options: Any) -> Any:
        device = whole_device(options.get("device_map"))
        if device is None:
            return from_pretrained.__func__(cls, pretrained_model_name_or_path, **options)
        options["device_map"] = str(device)
        if str(device) not in supported:
            supported.append(str(device))
        before = at_server.set(_server_has_all(cls, pretrained_model_name_or_path, str(device), options))
        try:
            return from_pretrained.__func__(cls, pretrained_model_name_or_path, **options)
        finally:
            at_server.reset(before)

    return loading


def _server_has_all(cls: Any, name: Any, device: str, options: Mapping[str, Any]) -> bool:
    """Return True if the server reads the weights of all components of a hub pipeline, so that the client downloads none.

    Args:
        cls: class of the pipeline.
        name: name of the pipeline on the hub.
        device: the remote device.
        options: keyword arguments of `from_pretrained`.
    """
    if Path(name).exists() or any(
        options.get(option) for option in ("variant", "use_onnx", "custom_pipeline", "force_download")
    ):
        return False
    try:
        components = cls.load_config(name, **{option: options[option] for option in _OPTIONS if option in options})
    except (OSError, ValueError):  # diffusers reports the error
        return False
    base = f"hf://{name}@{options.get('revision') or 'main'}"
    present = [
        server_weights(f"{base}/{part}", device)
        for part, description in components.items()
        if part not in options and _has_weights(description)
    ]
    return bool(present) and all(one is not None for one in present)


def _has_weights(described: object) -> bool:
    if not isinstance(described, list | tuple) or len(described) != 2:
        return False
    library, kind = described
    return library in _LIBRARIES and isinstance(kind, str) and not kind.endswith(_WEIGHTLESS)
