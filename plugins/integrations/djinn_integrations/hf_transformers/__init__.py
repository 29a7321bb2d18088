"""Adapters for transformers: `Trainer` and `pipeline` use the remote device, and the server reads weights of models."""

from __future__ import annotations

from collections.abc import Iterable

from djinn.hooks import Integration, hookimpl
from djinn_integrations.hf_transformers.adapters import adapt_adapters
from djinn_integrations.hf_transformers.device import adapt_pipeline, adapt_training_arguments
from djinn_integrations.hf_transformers.padding import adapt_models
from djinn_integrations.hf_transformers.server_folders import FOLDER_READERS, taking_addresses
from djinn_integrations.hf_transformers.trainer import adapt_trainer
from djinn_integrations.hf_transformers.weights import adapt_loading, adapt_pipelines

djinn_api_version = "2.0"


@hookimpl
def djinn_register_integrations() -> Iterable[Integration]:
    """Return adapters for the modules of transformers that choose devices, save their state or wait for them."""
    return [
        *(
            Integration(f"folders of the server in {module}", module, taking_addresses(*methods))
            for module, methods in FOLDER_READERS.items()
        ),
        Integration("transformers adapters", "peft.peft_model", adapt_adapters),
        Integration("transformers models", "transformers.modeling_utils", adapt_models),
        Integration("transformers loading", "transformers.modeling_utils", adapt_loading),
        Integration("transformers pipelines", "transformers.pipelines", adapt_pipelines),
        Integration("transformers pipeline device", "transformers.pipelines.base", adapt_pipeline),
        Integration("transformers trainer", "transformers.trainer", adapt_trainer),
        Integration("transformers training arguments", "transformers.training_args", adapt_training_arguments),
    ]
