"""Comparison of result layouts: a run strategy must keep the layout that the ops produce."""

from __future__ import annotations

import torch


def layout_difference(expected: torch.Tensor, found: torch.Tensor) -> str:
    """Describe how a result's layout differs from the expected one; empty if they are equal."""
    expected_layout, found_layout = _layout(expected), _layout(found)
    return (
        f"a result has the layout {found_layout} instead of {expected_layout}"
        if expected_layout != found_layout
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
