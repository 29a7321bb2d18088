"""Checkpoints of `Accelerator.save_state` keep the random state of the remote device."""

from __future__ import annotations

from typing import Any

from djinn.libraries import loading_random_state, rebind, saving_random_state


def adapt_checkpointing(module: Any) -> None:
    """`accelerate.checkpointing`: `Accelerator.save_state` and `load_state`."""
    for name, wrap in {
        "save_accelerator_state": saving_random_state,
        "load_accelerator_state": loading_random_state,
    }.items():
        function = getattr(module, name)
        rebind(function, wrap(function, position=0), ("accelerate",))
