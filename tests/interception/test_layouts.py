"""Results lie in memory as eager PyTorch lays them out, also after a call like it was seen with another layout."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional


def channels_last(device, channels):
    image = torch.randn(2, channels, 8, 8, generator=torch.Generator().manual_seed(0))
    return image.to(memory_format=torch.channels_last).to(device)


def dense(device):
    return channels_last(device, 4)


def channel_slice(device):
    return channels_last(device, 8).chunk(2, dim=1)[0]


def conv_and_norm(make, device):
    """Return the strides of a convolution, its result, and a norm whose kernel depends on those strides."""
    weight = torch.randn(8, 4, 1, 1, generator=torch.Generator().manual_seed(1)).to(device)
    found = functional.conv2d(make(device), weight)
    normed = functional.group_norm(found.view(2, 8, 64), 2)
    return found.stride(), found.cpu(), normed.cpu()


@pytest.mark.parametrize("order", [(dense, channel_slice), (channel_slice, dense)])
def test_learnt_layout_is_specific_to_operand_layout(embedded, order):
    for make in order * 2:
        stride, found, normed = conv_and_norm(make, embedded)
        expected_stride, expected, expected_normed = conv_and_norm(make, "cpu")
        assert stride == expected_stride
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(normed, expected_normed)
