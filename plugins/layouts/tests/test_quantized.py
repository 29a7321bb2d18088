"""Quantized tensors on the device: results equal the CPU's bit by bit; unsupported ops are refused by name."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from compared_layouts import equal, plain

import djinn

pytestmark = pytest.mark.filterwarnings("ignore:.*(TypedStorage is deprecated|functions that produce)")


def dense(device):
    return torch.arange(24.0).reshape(2, 3, 4).sin().to(device)


def quantized(device, dtype=torch.quint8):
    return torch.quantize_per_tensor(dense(device), 0.05, 20, dtype)


def by_channel(device):
    scales, zero_points = torch.tensor([0.1, 0.2, 0.03]).double(), torch.tensor([0, 3, -4])
    return torch.quantize_per_channel(dense(device), scales.to(device), zero_points.to(device), 1, torch.qint8)


def picture(device):
    return torch.quantize_per_tensor(torch.arange(128.0).reshape(1, 2, 8, 8).cos().to(device), 0.01, 128, torch.quint8)


def saved(made, where):
    file = io.BytesIO()
    torch.save({"it": made}, file)
    file.seek(0)
    return torch.load(file, map_location=where)["it"]


def repr_case(make):
    return lambda device: repr(make(device)).replace("device='remote_accelerator:0', ", "")


CASES = {
    "quantize_per_tensor": lambda d: [quantized(d, dtype) for dtype in (torch.quint8, torch.qint8, torch.qint32)],
    "of tensors": lambda d: torch.quantize_per_tensor(dense(d), torch.tensor(0.05).to(d), torch.tensor(3).to(d), torch.qint8),
    "dynamic": lambda d: torch.quantize_per_tensor_dynamic(dense(d), torch.quint8, False),
    "quantize_per_channel": by_channel,
    "float parameters": lambda d: torch.quantize_per_channel(dense(d), torch.tensor([0.1, 0.2, 0.03]).to(d), torch.tensor([0.5, 1.5, 2.0]).to(d), 1, torch.quint8),
    "dequantize": lambda d: [quantized(d).dequantize(), by_channel(d).dequantize(), torch.dequantize(quantized(d))],
    "int_repr": lambda d: [quantized(d).int_repr(), by_channel(d).int_repr()],
    "facts": lambda d: [quantized(d).q_scale(), quantized(d).q_zero_point(), str(quantized(d).qscheme()), quantized(d).is_quantized, quantized(d).dtype],
    "facts of channels": lambda d: [by_channel(d).q_per_channel_scales(), by_channel(d).q_per_channel_zero_points(), by_channel(d).q_per_channel_axis(), str(by_channel(d).qscheme())],
    "moved": lambda d: [quantized("cpu").to(d), by_channel("cpu").to(d)],
    "shape and strides": lambda d: [quantized(d).shape, quantized(d).stride(), quantized(d).transpose(0, 1).stride(), quantized(d).element_size()],
    "of integers": lambda d: torch._make_per_tensor_quantized_tensor(torch.arange(4, dtype=torch.int8).to(d), 0.5, 1),
    "without elements": lambda d: torch._empty_affine_quantized((0, 2), scale=0.5, zero_point=1, dtype=torch.qint8, device=d),
    "views": lambda d: [quantized(d).view(6, 4), quantized(d)[1], quantized(d)[:, 1:], quantized(d).permute(2, 0, 1), quantized(d).reshape(-1), quantized(d).flatten(), quantized(d).transpose(0, 1).contiguous()],
    "chosen": lambda d: [quantized(d)[torch.tensor([1, 0]).to(d)], quantized(d).index_select(1, torch.tensor([2, 0]).to(d)), quantized(d).flip(0)],
    "written through a view": lambda d: (q := quantized(d), q[0].copy_(q[1]))[0],
    "filled from floats": lambda d: quantized(d).copy_(dense(d) * 2),
    "filled from the CPU": lambda d: [quantized(d).copy_(dense("cpu") * 2), quantized(d).copy_(quantized("cpu"))],
    "compared": lambda d: [quantized(d) == quantized(d), quantized(d) < 0.5, torch.equal(quantized(d), quantized(d))],
    "reduced": lambda d: [quantized(d).max(), quantized(d).min(), quantized(d).mean(), quantized(d).max(1)],
    "sorted": lambda d: [quantized(d).sort(), quantized(d).topk(2)],
    "unary": lambda d: [quantized(d).relu(), quantized(d).sigmoid(), quantized(d).tanh(), quantized(d).clamp(-0.5, 0.5)],
    "in place": lambda d: quantized(d).relu_(),
    "joined": lambda d: torch.cat([quantized(d), quantized(d)]),
    "pooled": lambda d: [torch.nn.functional.max_pool2d(picture(d), 2), torch.nn.functional.avg_pool2d(picture(d), 2), torch.nn.functional.adaptive_avg_pool2d(picture(d), 3)],
    "upsampled": lambda d: torch.nn.functional.interpolate(picture(d), scale_factor=2, mode="nearest"),
    "clone": lambda d: [quantized(d).clone(), by_channel(d).clone(), copy.deepcopy(quantized(d)), copy.deepcopy(by_channel(d))],
    "saved": lambda d: [saved(quantized(d), d), saved(by_channel(d), d)],
    "loaded elsewhere": lambda d: [saved(quantized("cpu"), d), saved(by_channel("cpu"), d)],
    "loaded here": lambda d: saved(quantized(d), "cpu"),
    "printed": repr_case(quantized),
    "channels printed": repr_case(by_channel),
    "observed, by empty observers of channels": lambda d: observe_step(d, torch.tensor([])),
    "observed, by observers of channels": lambda d: observe_step(d, torch.zeros(4)),
    "fake": lambda d: torch.fake_quantize_per_tensor_affine(dense(d), 0.05, 20, 0, 255),
}  # fmt: skip


def observe_step(d, observers):
    """Return the result of a step of quantization-aware training, and the observers' state afterwards."""
    on, kept = torch.ones(1, device=d), [observers.clone().to(d) for _ in range(3)]
    zeros = observers.int().to(d)
    given = torch.arange(12.0, device=d).reshape(4, 3)
    out = torch.fused_moving_avg_obs_fake_quant(given, on, on, *kept, zeros, 0.01, -128, 127, 0, True, True)
    return [out, *kept, zeros]


@pytest.mark.parametrize("case", CASES)
def test_quantized_ops_equal_cpu(embedded, case):
    here, there = plain(CASES[case]("cpu")), plain(CASES[case](embedded))
    assert equal(here, there), (here, there)


@pytest.mark.parametrize("refused", [lambda q: q.cumsum(0), lambda q: q + q, lambda q: q.sin()])
def test_unsupported_quantized_ops_are_refused_by_name(embedded, refused):
    q = quantized(embedded)
    with pytest.raises(
        djinn.errors.UnsupportedOperation,
        match=r"aten::\w+.* does not support quantized tensors on remote_accelerator.*dequantize",
    ):
        refused(q)
    assert q.int_repr().sum().item() == quantized("cpu").int_repr().sum().item()


def test_transpose_of_per_channel_tensor_raises(embedded):
    for device in ("cpu", embedded):
        with pytest.raises(RuntimeError):
            by_channel(device).transpose(0, 1)
