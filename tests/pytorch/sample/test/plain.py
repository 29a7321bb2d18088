# ruff: noqa: PT009 - the style of Hugging Face's own tests
"""Tests as Hugging Face writes them: they read the device from the environment."""

from __future__ import annotations

import os
import unittest

import torch

DEVICE = os.environ.get("TRANSFORMERS_TEST_DEVICE", "cpu")


class PlainTest(unittest.TestCase):
    def test_adds(self):
        self.assertEqual((torch.ones(2, device=DEVICE) + 1).tolist(), [2, 2])

    def test_fails_on_the_device(self):
        self.assertEqual(torch.ones(2, device=DEVICE).device.type, "cpu")
