"""The device as Hugging Face's tests ask for it (`TRANSFORMERS_TEST_DEVICE_SPEC`)."""

from __future__ import annotations

import torch

DEVICE_NAME = "remote_accelerator"
MANUAL_SEED_FN = torch.manual_seed


def EMPTY_CACHE_FN() -> None:
    """Nothing: the executor keeps its memory."""


def DEVICE_COUNT_FN() -> int:
    """Number of devices that the tests may use."""
    return 1
