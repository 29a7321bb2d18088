"""Adapters for diffusers: the server reads the weights of models and pipelines that are loaded onto the remote device."""

from __future__ import annotations

from collections.abc import Iterable

from djinn.hooks import Integration, hookimpl
from djinn_integrations.diffusers.models import adapt_models, adapt_reading
from djinn_integrations.diffusers.pipelines import adapt_pipelines

djinn_api_version = "2.0"


@hookimpl
def djinn_register_integrations() -> Iterable[Integration]:
    """Return adapters for the modules that find and read checkpoints."""
    return [
        Integration("diffusers weights", "diffusers.models.model_loading_utils", adapt_reading),
        Integration("diffusers models", "diffusers.models.modeling_utils", adapt_models),
        Integration("diffusers pipelines", "diffusers.pipelines.pipeline_utils", adapt_pipelines),
    ]
