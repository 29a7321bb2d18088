"""Comparison of result layouts: a run strategy must keep the layout that the ops produce."""

from __future__ import annotations

import torch


def layout_difference(expected: torch.Tensor, actual: torch.Tensor) -> str:
    """Return a description of how the layouts of two tensors differ; empty if they are equal."""
    expected_layout, actual_layout = _layout(expected), _layout(actual)
    return (
        f"a result has the layout {actual_layout} instead of {expected_layout}"
        if expected_layout != actual_layout
        else ""
    )


def _layout(tensor: torch.Tensor) -> tuple[object, ...]:
    return (
        tuple(tensor.shape),
        tensor.stride(),
        tensor.storage_offset(),
        tensor.dtype,
        tensor.untyped_storage().nbytes(),
    )
