"""Formulas say of results what meta kernels say, and nothing where they do not know."""

from __future__ import annotations

import collections
import itertools
import random

import pytest
import torch
from long_forms import long_or

import djinn
from djinn_client.interception import dispatch
from djinn_client.interception.shape_inference import formulas, shape_formulas, view_formulas
from djinn_client.interception.shape_inference.formulas import forget_examples, has_formula, infer_by_formula, learn
from djinn_client.interception.shape_inference.meta_infer import infer
from djinn_core.ir.operators import allowed_operators, resolve

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
    """True if a formula gave the result; checks that it is right."""
    key, found = [id(func)], []
    dispatch._flatten(args, key, found)
    if not has_formula(func):
        return False
    by_formula = infer_by_formula(args, kwargs, key, operands, dispatch.slots_of(args, kwargs))
    try:
        inferred = infer(func, args, kwargs, 0)
    except Exception:
        assert by_formula is None
        return False
    learn(func, args, kwargs, key, inferred, numbers_in_tensors=False)
    if by_formula is not None:
        assert_equal(by_formula, inferred)
    return by_formula is not None


def assert_equal(call, inferred):
    assert call.results == inferred.results, (call.op, call.operands)
    assert call.operands == inferred.operands
    assert call.signature is inferred.signature
    for name in ("aliases", "inplace", "writes", "random", "changes", "new_count", "kind", "sequence"):
        assert getattr(call, name) == getattr(inferred, name), (call.op, name)
    own = [i for i, (a, same) in enumerate(zip(call.aliases, call.inplace, strict=True)) if a < 0 and same < 0]
    assert [call.nbytes[i] for i in own] == [inferred.nbytes[i] for i in own]


@pytest.fixture
def compared(monkeypatch):
    """Every result that a formula tells is compared with the meta kernel's; which ops were, and how often."""
    counted = collections.Counter()
    real = dispatch.infer_by_formula

    def comparing(args, kwargs, key, operands, slots):
        by_formula = real(args, kwargs, key, operands, slots)
        if by_formula is not None:
            func = resolve(by_formula.op)
            counted[func] += 1
            device = operands[0].remote.meta.device if operands else 0
            assert_equal(by_formula, dispatch.infer(func, args, kwargs, device))
        return by_formula

    forget_examples()
    monkeypatch.setattr(dispatch, "infer_by_formula", comparing)
    return counted


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
    forget_examples()  # those of other tests, of which a formula may want more
    row_major = torch.zeros(1, 1, dtype=torch.int64, device=DEVICE)
    assert sum(compare(aten.clone.default, [row_major], {}, [row_major]) for _ in range(3)) == 1
    count = 0
    for length in range(2, 8):
        last = torch.zeros(2, length, dtype=torch.int64, device=DEVICE)[:1, -1:]
        for func in (aten.clone.default, aten.detach.default):
            count += compare(func, [last], {}, [last])
        count += compare(aten.add.Tensor, [last, last], {}, [last, last])
        ends = torch.zeros(1, dtype=torch.int64, device=DEVICE)
        count += compare(aten.isin.Tensor_Tensor, [last, ends], {}, [last, ends])
    assert count == 16


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


# Ops of PyTorch's database whose samples have many sizes, strides and scalars.
DATABASE = (
    "add mul where clamp __getitem__ addmm baddbmm bmm mm matmul linalg.vector_norm amax amin argmax argmin any all cat stack cumsum "
    "expand flip gather index_select index_put logsumexp max min mean sum std var prod permute transpose unsqueeze squeeze "
    "view reshape repeat scatter scatter_add sort topk split split_with_sizes unbind select tril triu new_zeros new_full "
    "zeros_like full_like empty_like softmax log_softmax nn.functional.layer_norm nn.functional.group_norm "
    "nn.functional.batch_norm nn.functional.conv2d nn.functional.conv_transpose2d nn.functional.max_pool2d "
    "nn.functional.avg_pool2d nn.functional.adaptive_avg_pool2d nn.functional.nll_loss nn.functional.mse_loss "
    "nn.functional.smooth_l1_loss nn.functional.huber_loss nn.functional.embedding nn.functional.pad nn.functional.linear "
    "nn.functional.scaled_dot_product_attention nn.functional.interpolate nn.functional.rms_norm nn.functional.gelu"
).split()


@pytest.mark.filterwarnings("ignore")
def test_the_samples_of_the_database(embedded, compared):
    from torch.testing._internal.common_methods_invocations import op_db

    for op in (op for op in op_db if op.name in DATABASE):
        # Not `op.sample_inputs`, which formats a stack trace for each sample.
        torch.manual_seed(0)
        samples = op.sample_inputs_func(op, "cpu", torch.float32, requires_grad=op.supports_autograd)
        for sample in itertools.islice(samples, long_or(5, 8)):
            remote = sample.transform(
                lambda t: t.detach().to(DEVICE).requires_grad_(t.requires_grad) if isinstance(t, torch.Tensor) else t
            )
            out = op(remote.input, *remote.args, **remote.kwargs)
            leaves = [
                t for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, torch.Tensor) and t.requires_grad
            ]
            if leaves:
                sum(leaf.sum() for leaf in leaves).backward()
    assert len(compared) > long_or(30, 40)
    assert sum(compared.values()) > long_or(250, 500)


def transformer(d):
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).to(d)
    return model, lambda r: model(torch.randn(r(2, 9), r(5, 119), 16, device=d)).square().mean()


def language_model(d):
    embed, head = torch.nn.Embedding(50, 16), torch.nn.Linear(16, 50)
    model = torch.nn.ModuleList([embed, torch.nn.LayerNorm(16), torch.nn.RMSNorm(16), head]).to(d)

    def loss(r):
        given = torch.randint(0, 50, (r(2, 9), r(5, 60))).to(d)
        hidden = model[2](model[1](embed(given)))
        queries = hidden.unflatten(-1, (2, 8)).transpose(1, 2)
        mask = torch.ones(given.shape[1], given.shape[1], device=d).tril()[None, None].expand(len(given), 1, -1, -1) > 0
        hidden = torch.nn.functional.scaled_dot_product_attention(queries, queries, queries, mask)
        out = head(hidden.transpose(1, 2).flatten(2))
        return torch.nn.functional.cross_entropy(out[:, :-1].flatten(0, 1), given[:, 1:].flatten())

    return model, loss


def detector(d):
    nn = torch.nn
    body = nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.1),
        nn.GroupNorm(4, 8),
        nn.SiLU(),
    )
    model = nn.ModuleList([body, nn.Linear(8, 6), nn.AvgPool2d(2), nn.AdaptiveAvgPool2d(2)]).to(d)

    def loss(r):
        made = body(torch.randn(r(2, 5), 3, r(48, 119), r(48, 119), device=d))
        flat, count = made.flatten(2).transpose(1, 2), r(2, 30)
        chosen = model[1](flat[0, torch.randint(0, flat.shape[1], (count,)).to(d)])
        boxes, kinds = torch.rand(count, 4, device=d), torch.randint(0, 2, (count,)).to(d)
        first, last = boxes[:, None, :2].maximum(boxes[None, :, :2]), boxes[:, None, 2:].minimum(boxes[None, :, 2:])
        shared = (last - first).clamp(min=0).prod(-1)
        larger = torch.nn.functional.interpolate(made, scale_factor=2.0, mode="bilinear").mean()
        rest = shared.max(dim=1).values.mean() + chosen.topk(2, dim=1).values.std() + larger + model[2](made).mean()
        parts = chosen[:, :4].split(2, dim=1)
        rest = rest + parts[0].sum() + torch.stack([chosen.sigmoid(), chosen.tanh()]).mean() + model[3](made).sum()
        entropy = torch.nn.functional.cross_entropy(chosen[:, 4:], kinds)
        return torch.nn.functional.smooth_l1_loss(chosen[:, :4], boxes) + entropy + rest

    return model, loss


@pytest.mark.parametrize("build", [transformer, language_model, detector])
def test_programs_whose_sizes_vary_run_no_meta_kernels(embedded, compared, build):
    draw = random.Random(0)
    model, loss = build(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        optimizer.zero_grad()
        loss(draw.randint).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    for _ in range(4):
        step()
    before, captured = djinn.stats()["ops_inferred"], djinn.stats()["ops_captured"]
    for _ in range(6):
        step()
    inferred = djinn.stats()["ops_inferred"] - before
    assert inferred <= 0.02 * (djinn.stats()["ops_captured"] - captured), inferred
    assert len(compared) > 25


def test_a_formula_that_differs_from_the_meta_kernel_is_not_used(embedded, monkeypatch):
    forget_examples()
    wrong = {**shape_formulas._FORMULAS, aten.mm.default: lambda shapes, *_: ((shapes[0][0], shapes[1][1] + 1),)}
    monkeypatch.setattr(shape_formulas, "_FORMULAS", wrong)
    for size in (211, 223, 227, 229):
        assert (torch.zeros(size, 3, device=DEVICE) @ torch.zeros(3, 5, device=DEVICE)).shape == (size, 5)
    forget_examples()


def test_every_formula_is_of_an_op_that_programs_may_contain():
    for func in (*shape_formulas._FORMULAS, *view_formulas._FORMULAS):
        assert formulas.has_formula(func)
        assert func.name() in allowed_operators()
