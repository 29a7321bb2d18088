"""Checkpoints of `Trainer` keep the random state of the remote device."""

from __future__ import annotations

from typing import Any

from djinn.libraries import loading_random_state, saving_random_state


def adapt_trainer(module: Any) -> None:
    """`transformers.trainer`: `save_steps` and `train(resume_from_checkpoint=...)`."""
    trainer = module.Trainer
    trainer._save_rng_state = saving_random_state(trainer._save_rng_state, position=1)
    trainer._load_rng_state = loading_random_state(trainer._load_rng_state, position=1)
