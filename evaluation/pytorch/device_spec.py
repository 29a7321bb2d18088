"""Specification of the remote device for Hugging Face's tests (`TRANSFORMERS_TEST_DEVICE_SPEC`)."""

from __future__ import annotations

import torch

DEVICE_NAME = "remote_accelerator"
MANUAL_SEED_FN = torch.manual_seed


def EMPTY_CACHE_FN() -> None:
    """Do nothing: the executor keeps its memory."""


def DEVICE_COUNT_FN() -> int:
    """Return the number of devices for the tests."""
    return 1
