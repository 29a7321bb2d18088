"""`torch.autocast("remote_accelerator")` casts as on CUDA; the reference does the same casts by hand, on the CPU."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import djinn

TYPE = "remote_accelerator"
pytestmark = pytest.mark.usefixtures("embedded")


def autocast(dtype=torch.bfloat16, **options):
    return torch.autocast(TYPE, dtype=dtype, **options)


def tensors(*shapes):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator) for shape in shapes]


IMAGE = ((2, 3, 8, 8), (4, 3, 3, 3))
REDUCED = {
    "linear": (F.linear, ((5, 4), (3, 4), (3,))),
    "matmul": (torch.matmul, ((5, 4), (4, 3))),
    "addmm": (torch.addmm, ((5, 3), (5, 4), (4, 3))),
    "bmm": (torch.bmm, ((2, 5, 4), (2, 4, 3))),
    "baddbmm": (torch.baddbmm, ((2, 5, 3), (2, 5, 4), (2, 4, 3))),
    "mv": (torch.mv, ((5, 4), (4,))),
    "einsum": (lambda x, y: torch.einsum("ij,jk->ik", x, y), ((5, 4), (4, 3))),
    "conv1d": (F.conv1d, ((2, 3, 8), (4, 3, 3))),
    "conv2d": (F.conv2d, IMAGE),
    "conv_transpose2d": (F.conv_transpose2d, ((2, 3, 8, 8), (3, 4, 3, 3))),
    "prelu": (F.prelu, ((5, 4), (1,))),
    "multi_dot": (lambda *m: torch.linalg.multi_dot(m), ((5, 4), (4, 3), (3, 2))),
    "attention": (F.scaled_dot_product_attention, ((1, 2, 4, 8),) * 3),
}
SINGLE = {
    "exp": (torch.exp, ((5, 4),)),
    "log": (lambda x: torch.log(x.abs()), ((5, 4),)),
    "pow": (lambda x: x**2, ((5, 4),)),
    "rsqrt": (lambda x: torch.rsqrt(x.abs()), ((5, 4),)),
    "layer_norm": (lambda x: F.layer_norm(x, (4,)), ((5, 4),)),
    "group_norm": (lambda x: F.group_norm(x, 2), ((5, 4),)),
    "mse_loss": (F.mse_loss, ((5, 4), (5, 4))),
    "softplus": (F.softplus, ((5, 4),)),
    "cosine": (F.cosine_similarity, ((5, 4), (5, 4))),
    "with_logits": (F.binary_cross_entropy_with_logits, ((5, 4), (5, 4))),
    "bilinear": (lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), ((1, 2, 4, 4),)),
}
SINGLE_RESULT = {
    "sum": (torch.sum, ((5, 4),)),
    "sum_dim": (lambda x: x.sum(0), ((5, 4),)),
    "softmax": (lambda x: torch.softmax(x, -1), ((5, 4),)),
    "log_softmax": (lambda x: F.log_softmax(x, -1), ((5, 4),)),
    "cumsum": (lambda x: x.cumsum(0), ((5, 4),)),
    "norm": (torch.linalg.vector_norm, ((5, 4),)),
    "old_norm": (lambda x: x.norm(), ((5, 4),)),
    "old_norm_dim": (lambda x: x.norm(dim=0), ((5, 4),)),
}
MIXED = {
    "dot": (torch.dot, ((4,), (4,))),
    "addcmul": (torch.addcmul, ((4,), (4,), (4,))),
    "cross": (lambda x, y: torch.cross(x, y, dim=1), ((4, 3), (4, 3))),
    "atan2": (torch.atan2, ((4,), (4,))),
    "tensordot": (torch.tensordot, ((4, 3), (4, 3))),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", REDUCED)
def test_matmul_and_convolution_use_autocast_dtype(name, dtype):
    function, shapes = REDUCED[name]
    given = tensors(*shapes)
    with autocast(dtype):
        got = function(*[t.to(TYPE) for t in given])
    wanted = function(*[t.to(dtype) for t in given])
    assert got.dtype is dtype
    torch.testing.assert_close(got.cpu(), wanted)


def test_range_sensitive_ops_run_in_float32():
    for name, (function, shapes) in {**SINGLE, **SINGLE_RESULT}.items():
        given = [t.bfloat16() for t in tensors(*shapes)]
        with autocast():
            got = function(*[t.to(TYPE) for t in given])
        # Converting first and converting inside make the same of these.
        assert got.dtype is torch.float32, name
        torch.testing.assert_close(got.cpu(), function(*[t.float() for t in given]), msg=name)
    with autocast():
        assert torch.ones(3, device=TYPE).sum(dtype=torch.bfloat16).dtype is torch.bfloat16
        assert torch.ones(3, device=TYPE, dtype=torch.float64).exp().dtype is torch.float64


def test_mixed_dtypes_promote_to_widest():
    for name, (function, shapes) in MIXED.items():
        first, *others = tensors(*shapes)
        with autocast():
            narrow = function(*[t.bfloat16().to(TYPE) for t in (first, *others)])
            wide = function(first.bfloat16().to(TYPE), *[t.to(TYPE) for t in others])
        assert (narrow.dtype, wide.dtype) == (torch.bfloat16, torch.float32), name
        torch.testing.assert_close(wide.cpu(), function(first.bfloat16().float(), *others), msg=name)
    with autocast(), pytest.raises(RuntimeError, match="prioritize"):
        torch.dot(torch.ones(3, device=TYPE).half(), torch.ones(3, device=TYPE).half())


def test_unsafe_losses_are_refused():
    half = torch.full((3,), 0.5, device=TYPE)
    with autocast(), pytest.raises(RuntimeError, match="unsafe to autocast"):
        F.binary_cross_entropy(half, half)
    F.binary_cross_entropy(half, half)


class Model(torch.nn.Module):
    """A model with convolution, attention, norm and a head.

    `cast` and `back` replace autocasting on devices without it.
    """

    def __init__(self, cast=lambda t: t, back=lambda t: t):
        super().__init__()
        torch.manual_seed(3)
        self.convolution = torch.nn.Conv2d(1, 8, 3, padding=1)
        self.projection = torch.nn.Linear(8, 24)
        self.norm = torch.nn.LayerNorm(8)
        self.head = torch.nn.Linear(8, 10)
        self.cast, self.back = cast, back

    def linear(self, layer, x):
        return F.linear(self.cast(x), self.cast(layer.weight), self.cast(layer.bias))

    def forward(self, x):
        c = self.convolution
        x = F.conv2d(self.cast(x), self.cast(c.weight), self.cast(c.bias), padding=1).relu()
        x = x.flatten(2).transpose(1, 2)
        q, k, v = self.linear(self.projection, x).chunk(3, dim=-1)
        x = x + F.scaled_dot_product_attention(q, k, v)
        x = F.layer_norm(self.back(x), (8,), self.norm.weight, self.norm.bias)
        return self.linear(self.head, x.mean(1))


def train(model, device, context, steps=6):
    generator = torch.Generator().manual_seed(4)
    optimizer = torch.optim.AdamW(model.to(device).parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        x, y = torch.randn(8, 1, 6, 6, generator=generator), torch.randint(0, 10, (8,), generator=generator)
        optimizer.zero_grad()
        with context():
            logits = model(x.to(device))
            # `cross_entropy` asks for the logarithms in the dtype of the logits, which autocasting leaves as it is.
            log = logits.log_softmax(1).float() if logits.dtype is torch.bfloat16 and context is not autocast else None
            loss = F.cross_entropy(logits, y.to(device)) if log is None else F.nll_loss(log, y)
        loss.backward()
        assert all(p.grad.dtype is torch.float32 for p in model.parameters())
        optimizer.step()
        losses.append(loss.detach())
    return [loss.item() for loss in losses]


def test_bfloat16_training_equals_reference():
    reference = Model(lambda t: t.bfloat16(), lambda t: t.float())
    wanted = train(reference, "cpu", _NullContext)
    got = train(Model(), TYPE, autocast)
    assert got == pytest.approx(wanted, abs=2e-3)
    full = train(Model(), "cpu", _NullContext)
    assert got != pytest.approx(full, abs=1e-6)


class _NullContext:
    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None


def test_parameter_is_cast_once_per_block():
    layer = torch.nn.Linear(4, 4).to(TYPE)
    x = torch.randn(2, 4).to(TYPE)

    def casts():
        with djinn.capture() as captured, autocast():
            layer(x), layer(x)
            with torch.no_grad():
                layer(x)
            with autocast(cache_enabled=False):
                layer(x)
        return sum(i.op == "aten::_to_copy" for i in captured.program.instructions())

    # The input four times; weight and bias once, and once without the cache.
    assert casts() == 4 + 2 * 2
    with autocast():
        first = layer(x)
    with torch.no_grad():
        layer.weight.mul_(2)
    with autocast():
        assert not torch.equal(first.cpu(), layer(x).cpu())


def test_autocast_blocks_nest_and_are_thread_local():
    x = torch.randn(3, 3).to(TYPE)
    seen = {}

    def run_in_thread():
        seen["thread"] = (x @ x).dtype

    with autocast(torch.float16):
        assert torch.is_autocast_enabled(TYPE)
        assert torch.get_autocast_dtype(TYPE) is torch.float16
        with autocast(enabled=False):
            assert (x @ x).dtype is torch.float32
            with torch.amp.autocast(TYPE, dtype=torch.bfloat16):
                assert (x @ x).dtype is torch.bfloat16
        assert (x @ x).dtype is torch.float16
        assert (x.cpu() @ x.cpu()).dtype is torch.float32
        thread = threading.Thread(target=run_in_thread)
        thread.start()
        thread.join()
    assert seen == {"thread": torch.float32}
    assert (x @ x).dtype is torch.float32
    assert not torch.is_autocast_enabled(TYPE)
    with pytest.warns(UserWarning, match="only supports dtypes of torch.float16, torch.bfloat16"):
        block = autocast(torch.float64)
    with block:
        assert (x @ x).dtype is torch.float32


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_recomputes_with_same_casts(reentrant):
    def gradients(call):
        torch.manual_seed(5)
        block = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 4)).to(TYPE)
        x = torch.randn(2, 4).to(TYPE).requires_grad_()
        with autocast():
            out = call(block, x)
        out.float().pow(2).sum().backward()
        return [p.grad.cpu() for p in (x, *block.parameters())]

    plain = gradients(lambda block, x: block(x))
    again = gradients(lambda block, x: checkpoint(block, x, use_reentrant=reentrant))
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


def test_custom_function_sees_autocast_in_backward():
    seen = []

    class Product(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type=TYPE)
        def forward(ctx, a, b):
            ctx.save_for_backward(a, b)
            seen.append(torch.is_autocast_enabled(TYPE))
            return a.mm(b)

        @staticmethod
        @torch.amp.custom_bwd(device_type=TYPE)
        def backward(ctx, gradient):
            a, b = ctx.saved_tensors
            seen.append(torch.is_autocast_enabled(TYPE))
            return gradient.mm(b.t()), a.t().mm(gradient)

    class Exact(Product):
        forward = staticmethod(torch.amp.custom_fwd(Product.forward, device_type=TYPE, cast_inputs=torch.float32))

    a = torch.randn(3, 3).to(TYPE).requires_grad_()
    with autocast():
        out = Product.apply(a, a)
        exact = Exact.apply(a.bfloat16(), a.bfloat16())
    assert (out.dtype, exact.dtype) == (torch.bfloat16, torch.float32)
    out.sum().backward()
    assert seen == [True, False, True]
    assert a.grad.dtype is torch.float32


@pytest.mark.parametrize("kind", [torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN])
def test_recurrent_networks_under_autocast_equal_reference(kind):
    torch.manual_seed(6)
    network, x = kind(4, 8, num_layers=2, bidirectional=True, batch_first=True), torch.randn(2, 5, 4)
    with torch.no_grad():
        wanted = network.bfloat16()(x.bfloat16())[0]
    network.float().to(TYPE)
    with autocast():
        out = network(x.to(TYPE))[0]
    assert out.dtype is torch.bfloat16
    torch.testing.assert_close(out.cpu(), wanted, atol=3e-2, rtol=3e-2)
    out.float().sum().backward()
    assert all(p.grad.dtype is torch.float32 for p in network.parameters())


def test_functional_transforms_under_autocast_equal_reference():
    weight, batch = (t.to(TYPE) for t in tensors((3, 3), (4, 3, 3)))
    with autocast():
        assert torch.vmap(lambda a: a @ weight)(batch).dtype is torch.bfloat16
        gradient = torch.func.grad(lambda w: (batch[0] @ w).float().sum())(weight)
    assert gradient.dtype is torch.float32


def scaled_training(device, scaler):
    torch.manual_seed(7)
    layer = torch.nn.Linear(4, 2).to(device)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    history = []
    for step in range(6):
        optimizer.zero_grad()
        loss = layer(torch.full((3, 4), float(step + 1), device=device)).pow(2).mean()
        scaler.scale(loss * (float("inf") if step == 3 else 1)).backward()
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
        before = layer.weight.detach().cpu().clone()
        scaler.step(optimizer)
        scaler.update()
        history.append((scaler.get_scale(), norm.isfinite().item(), torch.equal(before, layer.weight.detach().cpu())))
    return history, layer.weight.detach().cpu()


def test_gradient_scaler_skips_steps_with_infinite_gradients():
    options = {"init_scale": 1024.0, "growth_interval": 2}
    scaler = torch.amp.GradScaler(TYPE, **options)
    history, weight = scaled_training(TYPE, scaler)
    wanted, expected = scaled_training("cpu", torch.amp.GradScaler("cpu", **options))
    assert history == wanted
    assert [same for *_, same in history] == [False, False, False, True, False, False]
    torch.testing.assert_close(weight, expected)
    other = torch.amp.GradScaler(TYPE)
    other.load_state_dict(scaler.state_dict())
    assert other.get_scale() == scaler.get_scale() == 2048.0
    with pytest.raises(RuntimeError, match="already been called"):
        layer = torch.nn.Linear(2, 2).to(TYPE)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        scaler.scale(layer(torch.ones(1, 2, device=TYPE)).sum()).backward()
        scaler.unscale_(optimizer)
        scaler.unscale_(optimizer)
