"""Which modules of which libraries are adapted, and by what."""

from __future__ import annotations

from djinn_core.interception.libraries import accelerate, inductor, safetensors
from djinn_core.interception.libraries.on_import import Adapt, adapt_on_import

_ADAPTED: dict[str, Adapt] = {
    "accelerate.state": accelerate.adapt_state,
    "accelerate.utils.modeling": accelerate.adapt_modeling,
    "safetensors": safetensors.adapt,
    "torch._inductor.compile_fx": inductor.adapt,
    "transformers.training_args": accelerate.adapt_training_arguments,
}


def install() -> None:
    """Tell libraries of the device: those that are imported now, the others when they are."""
    adapt_on_import(_ADAPTED)
