"""`torch.save` of remote tensors: all storages are fetched together."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from djinn_core.interception.tensors.batched_fetch import SavedStorages, expecting


def fetching_together(save: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.save`, which writes one storage after the other when it has pickled everything."""

    @functools.wraps(save)
    def saved(*args: Any, **kwargs: Any) -> Any:
        with expecting(SavedStorages()):
            return save(*args, **kwargs)

    return saved


def install() -> None:
    """Wrap it."""
    torch.save = torch.serialization.save = fetching_together(torch.serialization.save)
