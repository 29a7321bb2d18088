"""What is foretold for new sizes is what meta kernels say, and what cannot be foretold is not."""

from __future__ import annotations

import itertools

import pytest
import torch

from djinn_core.interception import dispatch
from djinn_core.interception.inference.growing import foretell, learn_example
from djinn_core.interception.inference.infer import infer

DEVICE = "remote_accelerator:0"
aten = torch.ops.aten
SHAPES = [(3, 4), (2, 4), (7, 5), (3, 1), (1, 5), (1, 1), (5,), (2, 3, 5), (2, 1, 4), (4, 3, 1, 2), ()]


def tensors(dtype, layout):
    for shape in SHAPES:
        plain = torch.zeros(shape, dtype=dtype, device=DEVICE)
        yield (
            plain
            if layout == "plain"
            else torch.zeros(shape[::-1], dtype=dtype, device=DEVICE).mT
            if len(shape) > 1
            else plain
        )


def compare(func, args, kwargs, operands):
    """Whether it was foretold; if so, rightly."""
    foretold = foretell(func, args, kwargs, operands)
    try:
        inferred = infer(func, args, kwargs, 0)
    except Exception:
        assert foretold is None
        return False
    learn_example(func, inferred)
    if foretold is not None:
        assert foretold.results == inferred.results
        assert foretold.signature is inferred.signature
        assert foretold.operands == inferred.operands
        assert foretold.aliases[0] >= 0 or foretold.nbytes == inferred.nbytes
    return foretold is not None


@pytest.mark.parametrize("func", [aten.add.Tensor, aten.where.self, aten.lt.Tensor, aten.gelu.default, aten.div.Tensor])
def test_pointwise_ops(embedded, func):
    count = 0
    for layout, dtypes in itertools.product(
        ("plain", "transposed"), [(torch.float32,) * 2, (torch.float16, torch.float32), (torch.int64, torch.float32)]
    ):
        for a, b in itertools.product(tensors(dtypes[0], layout), tensors(dtypes[1], "plain")):
            args = {aten.where.self: [a > 0, a, b], aten.gelu.default: [b]}.get(func, [a, b])
            count += compare(func, args, {}, args)
    assert count > 10


def test_numbers_that_decide_dtypes_are_left_to_meta_kernels(embedded):
    x = torch.zeros(3, dtype=torch.int64, device=DEVICE)
    for size, number in [(3, 1), (4, 1.5), (5, 2), (6, 2.5)]:
        x = torch.zeros(size, dtype=torch.int64, device=DEVICE)
        assert (x + number).dtype == (torch.zeros(size, dtype=torch.int64) + number).dtype
        compare(aten.add.Tensor, [x, number], {}, [x])
        compare(aten.add.Tensor, [x > 0, number], {}, [x > 0])
        compare(aten.add.Tensor, [x > 0, bool(number)], {}, [x > 0])


@pytest.mark.parametrize("dim", [0, 1, -1, 2])
def test_concatenation(embedded, dim):
    count = 0
    for sizes in itertools.product((0, 1, 2, 5), repeat=2):
        for rest in (3, 4):
            shapes = [[rest, rest, rest] for _ in sizes]
            for shape, size in zip(shapes, sizes, strict=True):
                shape[dim] = size
            parts = [torch.zeros(shape, device=DEVICE) for shape in shapes]
            count += compare(aten.cat.default, [parts, dim], {}, parts)
    assert count >= 8
    odd = [torch.zeros(2, 3, device=DEVICE), torch.zeros(4, 4, device=DEVICE)]
    assert not compare(aten.cat.default, [odd, 0], {}, odd)


@pytest.mark.parametrize("masked", [False, True])
def test_attention_over_a_growing_cache(embedded, masked):
    count = 0
    for queries, keys in itertools.product((1, 4, 5), range(4, 12)):
        query = torch.zeros(2, queries, 3, 8, device=DEVICE).transpose(1, 2)
        key, value = (torch.zeros(2, 3, keys, 8, device=DEVICE) for _ in range(2))
        mask = torch.zeros(2, 1, queries, keys, dtype=torch.bool, device=DEVICE) if masked else None
        operands = [query, key, value, *([mask] if masked else [])]
        args = [query, key, value, mask]
        count += compare(aten.scaled_dot_product_attention.default, args, {}, operands)
    assert count > 15


def test_slices(embedded):
    count = 0
    for size, (start, end), step in itertools.product(
        (4, 5, 9), [(0, 2), (-1, 2**63 - 1), (1, None), (None, -1), (3, 1), (-100, 100)], (1, 2)
    ):
        for x, dim in ((torch.zeros(3, size, device=DEVICE), 1), (torch.zeros(size, 3, device=DEVICE).t()[1:], -1)):
            args = [x, dim, start, end, step]
            count += compare(aten.slice.Tensor, args, {}, [x])
    assert count > 30


def test_copies_and_other_views(embedded):
    count = 0
    for length in range(2, 8):
        last = torch.zeros(2, length, dtype=torch.int64, device=DEVICE)[:1, -1:]
        for func in (aten.clone.default, aten.detach.default):
            count += compare(func, [last], {}, [last])
        count += compare(aten.add.Tensor, [last, last], {}, [last, last])
        ends = torch.zeros(1, dtype=torch.int64, device=DEVICE)
        count += compare(aten.isin.Tensor_Tensor, [last, ends], {}, [last, ends])
    assert count == 20


def test_a_mistake_is_refused_as_before(embedded):
    x = torch.zeros(3, 4, device=DEVICE)
    for size in (4, 4, 4):
        x + torch.zeros(size, device=DEVICE)
    with pytest.raises(RuntimeError, match=r"broadcast|must match"):
        x + torch.zeros(5, device=DEVICE)
    with pytest.raises(RuntimeError, match=r"Sizes of tensors must match"):
        torch.cat([x, torch.zeros(3, 5, device=DEVICE)])


def test_a_decode_step_infers_nothing(embedded, monkeypatch):
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=2, n_embd=32, n_head=4, vocab_size=64, bos_token_id=0, eos_token_id=0)
    local = GPT2LMHeadModel(config).eval()
    given = torch.arange(5)[None]
    expected = local.generate(given, max_new_tokens=12, do_sample=False, pad_token_id=0)
    remote = local.to(DEVICE)
    inferred, steps = [], []
    real = dispatch.infer
    monkeypatch.setattr(dispatch, "infer", lambda *a: (inferred.append((len(steps), a[0])), real(*a))[1])
    remote.register_forward_pre_hook(lambda *_: steps.append(None))
    assert (
        remote.generate(given.to(DEVICE), max_new_tokens=12, do_sample=False, pad_token_id=0).tolist()
        == expected.tolist()
    )
    assert [func for step, func in inferred if 4 < step < 12] == []
