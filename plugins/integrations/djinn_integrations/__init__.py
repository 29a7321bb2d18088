"""Adapters that make libraries use the remote device, a subpackage for each, and `weights`, which the server reads."""

from __future__ import annotations

import torch


def is_the_only_accelerator() -> bool:
    """Return True if PyTorch finds no accelerator on this machine, so that libraries would fall back to the CPU."""
    return not (torch.cuda.is_available() or torch.xpu.is_available() or torch.backends.mps.is_available())
