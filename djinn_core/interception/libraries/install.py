"""Table of the library modules that are adapted, each with its adapter."""

from __future__ import annotations

from djinn_core.interception.libraries import (
    accelerate,
    checkpoints,
    compiling,
    defaults,
    lightning,
    padding,
    safetensors,
    tracing,
)
from djinn_core.interception.libraries.on_import import Adapt, adapt_on_import

_ADAPTED: dict[str, Adapt] = {
    "accelerate.checkpointing": checkpoints.adapt_accelerate,
    "accelerate.state": accelerate.adapt_state,
    "accelerate.utils.modeling": accelerate.adapt_modeling,
    "lightning.fabric.accelerators": lightning.adapt_accelerators,
    "lightning.fabric.connector": lightning.adapt_fabric,
    "lightning.pytorch.accelerators": lightning.adapt_accelerators,
    "lightning.pytorch.trainer.connectors.accelerator_connector": lightning.adapt_trainer,
    "lightning_fabric.accelerators": lightning.adapt_accelerators,
    "lightning_fabric.connector": lightning.adapt_fabric,
    "pytorch_lightning.accelerators": lightning.adapt_accelerators,
    "pytorch_lightning.trainer.connectors.accelerator_connector": lightning.adapt_trainer,
    "safetensors": safetensors.adapt,
    "safetensors.torch": safetensors.adapt_saving,
    "sentence_transformers.util": defaults.adapt_sentence_transformers,
    "torch._dynamo.eval_frame": compiling.adapt_tracing,
    "torch._inductor.compile_fx": compiling.adapt_compiling,
    "torch.fx.experimental.proxy_tensor": tracing.adapt,
    "transformers.modeling_utils": padding.adapt,
    "transformers.pipelines.base": defaults.adapt_pipeline,
    "transformers.trainer": checkpoints.adapt_trainer,
    "transformers.training_args": accelerate.adapt_training_arguments,
}


def install() -> None:
    """Tell libraries of the device: those that are imported now, the others when they are."""
    adapt_on_import(_ADAPTED)
