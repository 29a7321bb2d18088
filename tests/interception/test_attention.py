"""`scaled_dot_product_attention` under autograd: the kernel that local eager takes, and its bits."""

from __future__ import annotations

import contextlib
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from djinn_client.interception.tap import Tap, taps

DEVICE = "remote_accelerator:0"
FUSED = "aten::_scaled_dot_product_flash_attention_for_cpu"
PLAIN = ((2, 4, 16, 8),) * 3


class Ops(list, Tap):
    """Collects the names of ops that this thread records inside the block."""

    def __enter__(self):
        taps.add(self)
        return self

    def __exit__(self, *_):
        taps.remove(self)

    def recorded(self, call, slots, operands, results):
        self.append(call.op)


def attention_results(
    device, shapes=PLAIN, dtype=torch.float32, look=lambda x: x, mask=None, mask_grad=False, **options
):
    """Return output and gradients of attention, each with its strides."""
    generator = torch.Generator().manual_seed(0)
    leaves = [torch.randn(s, generator=generator).to(device, dtype).requires_grad_() for s in shapes]
    if mask is not None:
        options["attn_mask"] = mask.to(device).requires_grad_(mask_grad)
        leaves += [options["attn_mask"]] if mask_grad else []
    out = F.scaled_dot_product_attention(*[look(x) for x in leaves[:3]], **options)
    grads = torch.autograd.grad(out.float().cos().sum(), leaves)
    return [(t.detach().cpu(), t.stride()) for t in (out, *grads)]


TALL = torch.linspace(-1, 1, 256).view(16, 16)
FUSED_CASES = {
    "plain": {},
    "causal and scaled": {"is_causal": True, "scale": 0.3},
    "float mask": {"mask": TALL},
    "bool mask": {"mask": TALL > -0.9},
    "shared key heads": {"shapes": (PLAIN[0], (2, 2, 16, 8), (2, 2, 16, 8)), "enable_gqa": True},
    "bfloat16, odd sizes": {"shapes": ((1, 3, 5, 7), (1, 3, 9, 7), (1, 3, 9, 7)), "dtype": torch.bfloat16},
    "transposed": {"shapes": ((2, 16, 4, 8),) * 3, "look": lambda x: x.transpose(1, 2), "dtype": torch.float64},
    "expanded": {"shapes": ((1, 4, 16, 8),) * 3, "look": lambda x: x.expand(3, 4, 16, 8)},
}
MATH_CASES = {
    "mask with a gradient": {"mask": TALL, "mask_grad": True},
    "no queries": {"shapes": ((2, 4, 0, 8), *PLAIN[1:])},
    "values of another width": {"shapes": (*PLAIN[:2], (2, 4, 16, 4))},
    "columns that are not contiguous": {"shapes": ((2, 4, 8, 16),) * 3, "look": lambda x: x.transpose(2, 3)},
}


# PyTorch 2.14 fuses attention without a batch, too.
(FUSED_CASES if torch.__version__ >= "2.14" else MATH_CASES).update({
    "three dimensions": {"shapes": ((2, 16, 8),) * 3},
    "three dimensions, transposed, bool mask": {
        "shapes": ((16, 2, 8),) * 3, "look": lambda x: x.transpose(0, 1), "mask": TALL > -0.9,
    },
})  # fmt: skip


@pytest.mark.parametrize("name", [*FUSED_CASES, *MATH_CASES])
def test_attention_bits_and_strides_equal_local(embedded, name):
    options = FUSED_CASES.get(name) or MATH_CASES.get(name, {})
    with Ops() as ops:
        there = attention_results(DEVICE, **options)
    here = attention_results("cpu", **options)
    assert all(torch.equal(a, b) for (a, _), (b, _) in zip(there, here, strict=True))
    assert [s for _, s in there] == [s for _, s in here]
    assert (ops.count(FUSED), ops.count(f"{FUSED}_backward")) == ((1, 1) if name in FUSED_CASES else (0, 0))


def test_unbatched_result_has_local_strides(embedded):
    def strides(device):
        x = torch.ones(16, 2, 8, device=device).transpose(0, 1)
        return [F.scaled_dot_product_attention(x, x, x, mask).stride() for mask in (None, TALL.to(device))]

    assert strides(DEVICE) == strides("cpu")


@pytest.mark.parametrize("mode", [contextlib.nullcontext, torch.no_grad, torch.inference_mode])
def test_disallowed_backends_are_not_used(embedded, mode):
    x = torch.randn(PLAIN[0], generator=torch.Generator().manual_seed(0))
    for allowed in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION):
        with mode(), sdpa_kernel(allowed), Ops() as ops:
            leaf = x.to(DEVICE).requires_grad_(mode is contextlib.nullcontext)
            out = F.scaled_dot_product_attention(leaf, leaf, leaf)
            assert torch.equal(out.detach().cpu(), F.scaled_dot_product_attention(x, x, x))
        assert (FUSED in ops) == (allowed is SDPBackend.FLASH_ATTENTION)
    with mode(), sdpa_kernel(SDPBackend.FLASH_ATTENTION), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # each reason against the kernel is one
        with pytest.raises(RuntimeError, match="No available kernel"):
            F.scaled_dot_product_attention(x.to(DEVICE), x.to(DEVICE), x.to(DEVICE), dropout_p=0.5)


def higher_gradients(device):
    leaves = [
        torch.linspace(-1, 1, 40).sin().view(1, 2, 5, 4).add(n).double().to(device).requires_grad_() for n in range(3)
    ]
    mask = torch.linspace(-1, 1, 25, dtype=torch.float64).view(5, 5).to(device)
    out = F.scaled_dot_product_attention(*leaves, attn_mask=mask, scale=0.7).sin().sum()
    first = torch.autograd.grad(out, leaves, create_graph=True)
    second = torch.autograd.grad(sum((g**2).sum() for g in first), leaves, create_graph=True)
    third = torch.autograd.grad(sum((g**2).sum() for g in second), leaves)
    return [t.detach().cpu() for t in (*first, *second, *third)]


def test_double_backward_without_fused_kernel(embedded):
    with Ops() as ops:
        there = higher_gradients(DEVICE)
    assert ops.count(f"{FUSED}_backward") > 0
    with sdpa_kernel(SDPBackend.MATH):
        torch.testing.assert_close(there, higher_gradients("cpu"))


def test_checkpointed_attention_under_autocast_equals_local(embedded):
    def step(device):
        x = torch.linspace(-1, 1, 80).view(1, 2, 5, 8).clone().to(device).requires_grad_()
        with torch.autocast(torch.device(device).type, torch.bfloat16):
            out = checkpoint(lambda x: F.scaled_dot_product_attention(x, x, x), x, use_reentrant=False)
        out.float().sum().backward()
        return out.detach().cpu(), x.grad.cpu()

    assert all(torch.equal(a, b) for a, b in zip(step(DEVICE), step("cpu"), strict=True))


def test_unused_attention_result_has_no_gradients(embedded):
    def gradients(device):
        torch.manual_seed(0)
        module = torch.nn.MultiheadAttention(4, 2, batch_first=True).to(device)
        x = torch.randn(3, 2, 4).to(device).requires_grad_()
        out = torch._C._functions.UndefinedGrad()(module(x, x, x, need_weights=False)[0])
        return torch.autograd.grad(out, (x, *module.parameters()), torch.ones_like(out), allow_unused=True)

    assert gradients("cpu") == gradients(embedded) == (None,) * 5
