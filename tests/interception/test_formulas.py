"""Results of calls with new sizes, which C++ computes by a rule, are those of PyTorch's meta kernels."""

from __future__ import annotations

import collections
import itertools
import random

import pytest
import torch
from long_forms import long_or
from torch.utils import _pytree as pytree

import djinn
from djinn_client.interception import dispatch
from djinn_client.interception.dispatch import infer
from djinn_client.interception.native.library import ops
from djinn_client.interception.recording import recorder as recorders
from djinn_client.interception.recording.recorder import current
from djinn_client.interception.tap import Tap, taps
from djinn_client.interception.tensors.lazy_tensor import logical_device, wrap
from djinn_client.interception.tensors.storage import borrow
from djinn_core.ir.arguments import call_arguments
from djinn_core.ir.handles import make_handle
from djinn_core.ir.operators import resolve

DEVICE = "remote_accelerator:0"
aten = torch.ops.aten
SHAPES = [(3, 4), (7, 4), (3, 1), (1, 4), (4,), (2, 3, 4), (2, 1, 1), ()]


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


def check_formula_calls(entries, first):
    """Compare the calls that a formula inferred with PyTorch's meta kernel. Return their ops."""
    found = []
    for entry, number in zip(entries[first:], entries.call_numbers[1][first:].tolist(), strict=True):
        if ops.describe_call(number)[0] < 0:
            continue
        call = entry.call
        operands = [wrap(borrow(make_handle(1 << 28, i + 1), meta)) for i, meta in enumerate(call.operands)]
        args, kwargs = call_arguments(call.signature.form, operands, entry.slots, logical_device(0))
        func = resolve(call.op)
        assert_equal(call, infer(func, tuple(args), kwargs, 0))
        found.append(func)
    return found


def check_call(func, args, kwargs=None):
    """Call an op. Return True if a formula inferred the call. Assert that its metadata is right."""
    before = current().unsent
    try:
        kept = func(*args, **kwargs or {})
    except (RuntimeError, IndexError):
        return False
    found = check_formula_calls(current().entries, before)
    del kept
    return bool(found)


def assert_equal(call, inferred):
    assert call.results == inferred.results, (call.op, call.operands)
    assert call.operands == inferred.operands
    assert call.signature is inferred.signature
    for name in ("aliases", "inplace", "writes", "random", "changes", "new_count", "kind", "sequence"):
        assert getattr(call, name) == getattr(inferred, name), (call.op, name)
    own = [i for i, (a, same) in enumerate(zip(call.aliases, call.inplace, strict=True)) if a < 0 and same < 0]
    assert [call.nbytes[i] for i in own] == [inferred.nbytes[i] for i in own]


@pytest.fixture
def check_all_calls(monkeypatch):
    """Each call of a program that a rule made is compared with the meta kernel's result; which ops were, and how often."""
    counted, wrong = collections.Counter(), []

    class CheckedProgram(recorders.RecordedProgram):
        def __init__(self, *args):
            super().__init__(*args)
            try:
                counted.update(check_formula_calls(self, 0))
            except Exception as error:
                wrong.append(error)

    monkeypatch.setattr(recorders, "RecordedProgram", CheckedProgram)
    yield counted
    djinn.synchronize()
    assert not wrong, wrong[0]


@pytest.mark.parametrize("func", [aten.add.Tensor, aten.where.self, aten.lt.Tensor, aten.gelu.default, aten.div.Tensor])
def test_pointwise_formula_equals_meta_kernel(embedded, func):
    count = 0
    for layout, dtypes in itertools.product(
        ("plain", "transposed"), [(torch.float32,) * 2, (torch.float16, torch.float32), (torch.int64, torch.float32)]
    ):
        for a, b in itertools.product(tensors(dtypes[0], layout), tensors(dtypes[1], "plain")):
            args = {aten.where.self: [a > 0, a, b], aten.gelu.default: [b]}.get(func, [a, b])
            count += check_call(func, args)
    assert count > 10


def test_dtype_deciding_scalars_use_meta_kernels(embedded):
    x = torch.zeros(3, dtype=torch.int64, device=DEVICE)
    for size, number in [(3, 1), (4, 1.5), (5, 2), (6, 2.5)]:
        x = torch.zeros(size, dtype=torch.int64, device=DEVICE)
        assert (x + number).dtype == (torch.zeros(size, dtype=torch.int64) + number).dtype
        check_call(aten.add.Tensor, [x, number])
        check_call(aten.add.Tensor, [x > 0, number])
        check_call(aten.add.Tensor, [x > 0, bool(number)])


@pytest.mark.parametrize("dim", [0, 1, -1, 2])
def test_concatenation_formula_equals_meta_kernel(embedded, dim):
    count = 0
    for sizes in itertools.product((0, 1, 2, 5), repeat=2):
        for rest in (3, 4):
            shapes = [[rest, rest, rest] for _ in sizes]
            for shape, size in zip(shapes, sizes, strict=True):
                shape[dim] = size
            parts = [torch.zeros(shape, device=DEVICE) for shape in shapes]
            count += check_call(aten.cat.default, [parts, dim])
    assert count >= 8
    odd = [torch.zeros(2, 3, device=DEVICE), torch.zeros(4, 4, device=DEVICE)]
    assert not check_call(aten.cat.default, [odd, 0])


@pytest.mark.parametrize("masked", [False, True])
def test_attention_formula_with_growing_cache(embedded, masked):
    count = 0
    for queries, keys in itertools.product((1, 4, 5), range(4, 12)):
        query = torch.zeros(2, queries, 3, 8, device=DEVICE).transpose(1, 2)
        key, value = (torch.zeros(2, 3, keys, 8, device=DEVICE) for _ in range(2))
        mask = torch.zeros(2, 1, queries, keys, dtype=torch.bool, device=DEVICE) if masked else None
        args = [query, key, value, mask]
        count += check_call(aten.scaled_dot_product_attention.default, args)
    assert count > 15


def test_slice_formula_equals_meta_kernel(embedded):
    count = 0
    for size, (start, end), step in itertools.product(
        (4, 5, 9), [(0, 2), (-1, 2**63 - 1), (1, None), (None, -1), (3, 1), (-100, 100)], (1, 2)
    ):
        for x, dim in ((torch.zeros(3, size, device=DEVICE), 1), (torch.zeros(size, 3, device=DEVICE).t()[1:], -1)):
            args = [x, dim, start, end, step]
            count += check_call(aten.slice.Tensor, args)
    assert count > 30


def test_copy_and_view_formulas_equal_meta_kernel(embedded):
    count = 0
    for length in range(2, 8):
        last = torch.zeros(2, length, dtype=torch.int64, device=DEVICE)[:1, -1:]
        count += check_call(aten.clone.default, [last])
        count += check_call(aten.add.Tensor, [last, last])
        ends = torch.zeros(1, dtype=torch.int64, device=DEVICE)
        count += check_call(aten.isin.Tensor_Tensor, [last, ends])
    assert count >= 15


def test_invalid_call_raises_after_formula_is_learned(embedded):
    x = torch.zeros(3, 4, device=DEVICE)
    for size in (4, 4, 4):
        x + torch.zeros(size, device=DEVICE)
    with pytest.raises(RuntimeError, match=r"broadcast|must match"):
        x + torch.zeros(5, device=DEVICE)
    with pytest.raises(RuntimeError, match=r"Sizes of tensors must match"):
        torch.cat([x, torch.zeros(3, 5, device=DEVICE)])


def _vary_one_number(args):
    """Yield the arguments with one changed integer, or one changed size of one tensor."""
    leaves, spec = pytree.tree_flatten(args)
    for place, leaf in enumerate(leaves):
        others = []
        if type(leaf) is int:
            others = {leaf + 1, -1, -leaf - 1, 100, -100} - {leaf}
        elif isinstance(leaf, torch.Tensor):
            shapes = [(*leaf.shape[:d], n, *leaf.shape[d + 1 :]) for d in range(leaf.dim()) for n in (2, 7)]
            others = [leaf.new_zeros(shape) for shape in shapes if shape != leaf.shape]
        for other in others:
            yield pytree.tree_unflatten([*leaves[:place], other, *leaves[place + 1 :]], spec)


def _calls_with_mistakes_nearby():
    x, square, image = torch.ones(3, 4), torch.ones(4, 4), torch.ones(2, 3, 8, 8)
    heads, indices = torch.ones(2, 4, 5, 8), torch.zeros(3, 4, dtype=torch.int64)
    keys = torch.ones(2, 4, 6, 8)
    yield from ((f, (x, square, torch.ones(4))) for f in (aten.linear.default,))
    yield from ((f, (heads, heads.mT.contiguous())) for f in (aten.matmul.default,))
    yield from ((f, (x, [4], torch.ones(4))) for f in (aten.layer_norm.default, aten.rms_norm.default))
    yield aten.native_layer_norm.default, (x, [4], torch.ones(4), torch.ones(4), 1e-5)
    statistics = torch.ones(3, 1)
    norm = (x, x, [4], statistics, statistics, torch.ones(4), torch.ones(4), [True, True, True])
    yield aten.native_layer_norm_backward.default, norm
    yield aten.scaled_dot_product_attention.default, (heads, keys, keys, torch.ones(5, 6))
    yield aten._scaled_dot_product_flash_attention_for_cpu.default, (heads, keys, keys)
    softmaxes = (aten._softmax.default, aten._log_softmax.default)
    yield from ((f, (x, 1, False)) for f in softmaxes)
    yield from ((f, (x, 1)) for f in (aten._safe_softmax.default, aten.cumsum.default, aten.max.dim, aten.unbind.int))
    yield from ((f, (x, [0, 1])) for f in (aten.flip.default, aten.sum.dim_IntList, aten.amax.default))
    yield from ((f, ([x, x], 1)) for f in (aten.cat.default, aten.stack.default))
    yield from ((f, (x, square)) for f in (aten.mm.default,))
    yield aten.addmm.default, (torch.ones(4), x, square)
    yield aten.bmm.default, (x.expand(2, 3, 4).clone(), square.expand(2, 4, 4).clone())
    yield aten.baddbmm.default, (x.expand(2, 3, 4).clone(), x.expand(2, 3, 4).clone(), square.expand(2, 4, 4).clone())
    yield aten.gather.default, (x, 1, indices)
    yield aten.index.Tensor, (square, [indices, indices])
    yield aten.embedding.default, (square, indices)
    yield aten.topk.default, (x, 2, 1)
    yield aten.convolution.default, (image, torch.ones(5, 3, 3, 3), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    yield aten.max_pool2d_with_indices.default, (image, [2, 2], [2, 2], [1, 1])
    yield from ((f, (x, [2, 3])) for f in (aten.repeat.default, aten.new_zeros.default))
    yield from ((f, (x, [2, 6])) for f in (aten.view.default, aten._unsafe_view.default))
    yield from ((f, (x, 0, 1)) for f in (aten.transpose.int, aten.select.int, aten.slice.Tensor))
    yield aten.expand.default, (torch.ones(3, 1), [3, 5])
    yield aten.split_with_sizes.default, (x, [2, 2], 1)
    yield aten.polygamma.default, (2, x)
    yield aten.mvlgamma.default, (x + 5, 2)


def test_formulas_refuse_what_kernels_refuse(embedded, monkeypatch):
    def on_device(args):
        return pytree.tree_map_only(torch.Tensor, lambda t: t.to(DEVICE), args)

    def shapes(made):
        return [t.shape for t in pytree.tree_leaves(made) if isinstance(t, torch.Tensor)]

    class NoRule(Exception):
        pass

    def infers(*_):
        raise NoRule

    made_by_rule = collections.Counter()
    for func, args in _calls_with_mistakes_nearby():
        func(*on_device(args))
        varied = [(here, on_device(here)) for here in _vary_one_number(args)]
        with monkeypatch.context() as patch:
            patch.setattr(dispatch, "_record_unknown", infers)
            for here, there in varied:
                try:
                    made = func(*there)
                except NoRule:
                    continue
                assert shapes(made) == shapes(func(*here)), func
                made_by_rule[func] += 1
        djinn.synchronize()
    assert len(made_by_rule) > 30
    assert sum(made_by_rule.values()) > 150


def test_formula_with_device_argument_records_one_op(embedded):
    for size in range(3, 7):
        x = torch.zeros(size, device=DEVICE)
        before = current().unsent
        x.new_zeros(size, device=x.device)
        assert [entry.call.op for entry in current().entries[before:]] == ["aten::new_zeros"]


def test_interrupt_in_meta_kernel_is_raised(embedded, monkeypatch):
    def gather(size):
        index = torch.zeros(size, 2, dtype=torch.int64, device=DEVICE)
        return torch.zeros(size, 4, device=DEVICE).gather(1, index)

    def interrupt(*_):
        raise KeyboardInterrupt

    gather(3)
    with monkeypatch.context() as patch:
        patch.setattr(torch._meta_registrations, "maybe_wrap_dim", interrupt)
        with pytest.raises(KeyboardInterrupt):
            gather(5)
    assert gather(6).tolist() == [[0.0, 0.0]] * 6


def test_taps_see_calls_recorded_in_cpp(embedded):
    class RecordingTap(Tap):
        def __init__(self):
            self.ops = []

        def recorded(self, call, slots, operands, results):
            self.ops.append(call.op)

    known, seen = torch.ones((), dtype=torch.int64, device=DEVICE), RecordingTap()
    known + 1
    taps.add(seen)
    try:
        known + 1
    finally:
        taps.remove(seen)
    assert seen.ops == ["aten::add.Tensor"]


def test_op_after_failed_handler_uses_own_handler(embedded):
    known = torch.ones(2, dtype=torch.int64, device=DEVICE)
    with pytest.raises(RuntimeError, match="must match"):
        known + torch.ones(3, dtype=torch.int64, device=DEVICE)
    assert int((known + 1)[0]) == 2


def test_decode_step_runs_no_meta_kernel(embedded, monkeypatch):
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
def test_op_database_samples_equal_meta_kernels(embedded, check_all_calls):
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
    assert len(check_all_calls) > long_or(30, 40)
    assert sum(check_all_calls.values()) > long_or(250, 500)


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
def test_varying_sizes_run_no_meta_kernels(embedded, check_all_calls, build):
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
    djinn.synchronize()
    inferred = djinn.stats()["ops_inferred"] - before
    assert inferred <= 0.02 * (djinn.stats()["ops_captured"] - captured), inferred
    assert len(check_all_calls) > 25
