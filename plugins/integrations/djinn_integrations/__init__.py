"""Adapters that make libraries use the remote device, one subpackage per library, and weights that the server reads."""

from __future__ import annotations

import torch


def is_the_only_accelerator() -> bool:
    """Return True if the remote device is the only accelerator: PyTorch finds none on this machine."""
    return not (torch.cuda.is_available() or torch.xpu.is_available() or torch.backends.mps.is_available())
