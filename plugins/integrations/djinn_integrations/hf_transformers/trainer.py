"""Checkpoints of `Trainer`: with the device's random state. At a server address, their tensors stay on the server."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from djinn.weights import remove_weights
from djinn_client.interception.tensors.lazy_tensor import is_remote
from djinn_integrations.random_state_files import loading_random_state, saving_random_state
from djinn_integrations.weights.server_files import address_in, loading_stays_on, saved_at


def adapt_trainer(module: Any) -> None:
    """Adapt `transformers.trainer`: checkpoints have the remote random state, and may be at server addresses."""
    trainer = module.Trainer
    trainer._save_rng_state = saving_random_state(trainer._save_rng_state, position=1)
    trainer._load_rng_state = loading_random_state(trainer._load_rng_state, position=1)
    trainer._load_from_checkpoint = _staying(trainer._load_from_checkpoint)
    trainer._load_optimizer_and_scheduler = _staying(trainer._load_optimizer_and_scheduler)
    module.rotate_checkpoints = _rotating(module.rotate_checkpoints)


def _rotating(rotate: Callable[..., Any]) -> Callable[..., Any]:
    """Return a wrapper of `rotate_checkpoints` that also removes old checkpoints from the server."""

    @functools.wraps(rotate)
    def rotated(output_dir: Any, *args: Any, **options: Any) -> Any:
        files = list(Path(output_dir).rglob("*")) if address_in(output_dir) else []
        noted = {file: address for file in files if file.is_file() and (address := saved_at(file)) is not None}
        result = rotate(output_dir, *args, **options)
        for file, address in noted.items():
            if not file.exists():
                remove_weights(address)
        return result

    return rotated


def _staying(load: Callable[..., Any]) -> Callable[..., Any]:
    """Return a wrapper of a method that loads a part of a checkpoint.

    If the checkpoint is at a server address, its tensors stay on the remote device. `load` alone would use the CPU.
    """

    @functools.wraps(load)
    def loaded(self: Any, checkpoint: Any, *args: Any, **options: Any) -> Any:
        if address_in(checkpoint) is None or not is_remote(self.args.device):
            return load(self, checkpoint, *args, **options)
        with loading_stays_on(self.args.device):
            return load(self, checkpoint, *args, **options)

    return loaded
