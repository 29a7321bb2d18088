# ruff: noqa: PT009 - the style of PyTorch's own tests
"""Tests as PyTorch writes them, one for each thing that the runner has to tell."""

from __future__ import annotations

import signal
import time

import torch
from torch.testing._internal.common_device_type import dtypes, dtypesIfCPU, instantiate_device_type_tests, onlyCPU
from torch.testing._internal.common_utils import TestCase


class TestSample(TestCase):
    @dtypes(torch.float32, torch.int64)
    def test_adds(self, device, dtype):
        ones = torch.ones(2, 3, device=device, dtype=dtype)
        self.assertEqual(ones + ones, torch.full((2, 3), 2, device=device, dtype=dtype))

    @onlyCPU
    def test_is_for_the_cpu(self, device):
        self.assertEqual(torch.ones(2, device=device).numpy().sum(), 2)

    @dtypes(torch.float32)
    @dtypesIfCPU(torch.float16, torch.float32)
    def test_is_made_for_the_cpu(self, device, dtype):
        self.assertEqual(torch.ones(2, device=device, dtype=dtype).sum(), 2)

    def test_fails_on_both(self, device):
        self.assertEqual(torch.ones(2, device=device), torch.zeros(2, device=device))

    def test_fails_on_the_device(self, device):
        self.assertEqual(torch.ones(2, device=device).device.type, "cpu")

    def test_hangs_on_the_device(self, device):
        if device != "cpu":
            self.assertGreater(signal.getitimer(signal.ITIMER_REAL)[0], 0)
            signal.getsignal(signal.SIGALRM).__self__.longest = 0.1
            signal.setitimer(signal.ITIMER_REAL, 0.1)  # its limit comes soon
        while device != "cpu":
            time.sleep(1)

    def test_loses_its_session_on_the_device(self, device):
        tensor = torch.ones(2, device=device)
        if device != "cpu":
            import djinn

            djinn.shut_down()
            self.assertEqual(tensor, torch.ones(2))

    def test_multiplies_after_that(self, device):
        self.assertEqual(torch.full((2,), 3.0, device=device) * 2, torch.full((2,), 6.0))


instantiate_device_type_tests(TestSample, globals())
