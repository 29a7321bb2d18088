"""A script of a reader's: it computes something on the device."""

import torch

import djinn  # noqa: F401 - registers the device

print(
    (torch.ones(64, 64, device="remote_accelerator:0") @ torch.ones(64, 64, device="remote_accelerator:0")).sum().item()
)
