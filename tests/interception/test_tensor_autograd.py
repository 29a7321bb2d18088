"""Autograd on remote tensors: hooks, transforms, custom functions, checkpoints."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.autograd.forward_ad as fwd
import torch.nn.functional as F
from sameness import assert_same_as_cpu, assert_same_error, waves
from torch import nn
from torch.autograd import functional
from torch.func import (
    functional_call,
    functionalize,
    grad,
    grad_and_value,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    linearize,
    stack_module_state,
    vjp,
    vmap,
)
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from djinn_core.errors import UnsupportedOperation

CASES = []
MISTAKES = []


def case(function):
    CASES.append(function)
    return function


def mistake(function):
    MISTAKES.append(function)
    return function


def network(d):
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(waves("cpu", *p.shape))
    return model.to(d)


def gradients(model):
    return [p.grad for p in model.parameters()]


def leaf(d, *shape):
    return waves(d, *shape).requires_grad_()


# --- hooks --------------------------------------------------------------------------------------------------------


@case
def module_hooks(d):
    model, seen, x = network(d), [], leaf(d, 2, 3)
    model[0].register_forward_pre_hook(lambda m, a: (a[0] * 2,))
    model[0].register_forward_hook(lambda m, a, out: out + 1)
    model[2].register_forward_pre_hook(lambda m, a, k: ((a[0] + 1,), k), with_kwargs=True)
    model[2].register_forward_hook(lambda m, a, k, out: out * 2, with_kwargs=True)
    model.register_full_backward_hook(lambda m, given, asked: seen.append((given, asked)))
    model[2].register_full_backward_hook(lambda m, given, asked: (given[0] * 3,))
    model[0].register_full_backward_pre_hook(lambda m, asked: (asked[0] * 2,))
    everywhere = nn.modules.module.register_module_forward_hook(lambda m, a, out: seen.append(out))
    try:
        model(x).sum().backward()
    finally:
        everywhere.remove()
    return x.grad, gradients(model), seen


@case
def tensor_hooks(d):
    seen, x = [], leaf(d, 3)
    y = x * 2
    y.register_hook(lambda g: g * 5)
    y.retain_grad()
    handle = x.register_hook(seen.append)
    x.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad * 1))
    torch.autograd.graph.register_multi_grad_hook((x, y), seen.append)
    y.grad_fn.register_hook(lambda given, asked: seen.append((given, asked)))
    y.grad_fn.register_prehook(lambda asked: (asked[0] * 2,))
    (y**2).sum().backward()
    handle.remove()
    return x.grad, y.grad, seen, y.grad_fn.name()


@case
def optimizers_in_hooks(d):
    model = network(d)
    for p in model.parameters():
        optimizer = torch.optim.SGD([p], 0.1)
        p.register_post_accumulate_grad_hook(lambda p, o=optimizer: (o.step(), o.zero_grad())[0])
    model(waves(d, 2, 3)).sum().backward()
    return model, gradients(model)


@case
def saved_tensor_hooks(d):
    seen, x = [], leaf(d, 3)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (seen.append(t.shape), t.cpu())[1], lambda t: t.to(d)):
        (x.exp() * x).sum().backward()
    with torch.autograd.graph.save_on_cpu():
        (x.exp() * x).sum().backward()
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        y = x.clone()
        out = (y**2).sum()
        y.sin_()
        out.backward()
    return x.grad, seen, x.exp().grad_fn._saved_result


# --- transforms ---------------------------------------------------------------------------------------------------


@case
def func_gradients(d):
    x, ones = waves(d, 3), torch.ones(3, device=d)
    value, pull = vjp(torch.sin, x)
    twice = grad(grad(lambda x: x**3))(waves(d, 1)[0])
    pushed = jvp(lambda x, y: (x @ y).exp(), (waves(d, 2, 3), waves(d, 3, 2)), (waves(d, 2, 3), waves(d, 3, 2)))
    return grad_and_value(lambda x: (x**3).sum())(x), twice, value, pull(ones), jvp(torch.sin, (x,), (ones,)), pushed


@case
def forward_mode_of_infinities(d):
    """Missing tangents are zeros. Products with infinity do not become NaN, and signs of zeros are kept."""
    x, ones = torch.tensor([torch.inf, 1.0, -2.0]).to(d), torch.ones(3, device=d)
    functions = (
        lambda t: t * ones * 3,
        lambda t: t / (ones * torch.inf),
        lambda t: 2 / t,
        lambda t: t @ x,
        lambda t: t.addcmul(x, x),
        lambda t: F.linear(t, x[None], ones[:1]),
        grad(lambda t: (t**3).sum()),
    )
    basis = torch.tensor([1.0, 0.0, 0.0]).to(d)
    return [str(jvp(f, (x,), (basis,))[1].tolist()) for f in functions]


@case
def zero_tensors(d):
    zero, target = torch._efficientzerotensor((2,), device=d), torch.ones(2, device=d)
    target.copy_(zero)
    made = zero + target, zero * target, zero.view(2, 1), torch.cat([zero, target + 1]), zero.cpu()
    return target, *made, zero.dot(target), zero._is_zerotensor(), zero.clone()._is_zerotensor()


@mistake
def write_to_zero_tensor(d):
    torch._efficientzerotensor((2,), device=d).add_(1)


@case
def func_jacobians(d):
    x, model = waves(d, 3), network(d)
    weights = dict(model.named_parameters())
    bias = weights["0.bias"].detach()

    def loss(bias):
        return functional_call(model, {**weights, "0.bias": bias}, (waves(d, 2, 3),)).sum()

    square = jacrev(lambda x: x**2)(x), jacrev(lambda x: x**2, chunk_size=1)(x), jacfwd(lambda x: (x**2).sin())(x)
    return square, hessian(lambda x: (x**3).sum())(x), hessian(loss)(bias)


@case
def func_vmap(d):
    x, y = waves(d, 3, 4), waves(d, 3, 4)
    chosen = vmap(lambda row, i: row[i])(x, torch.tensor([0, 2, 1], device=d))
    drawn = [vmap(lambda r: r + torch.randn(4, device=d), randomness=r)(x).shape for r in ("same", "different")]
    return (
        vmap(torch.dot)(x, y),
        vmap(lambda c: c.sum() + 1, in_dims=1)(x),
        vmap(vmap(torch.mul))(x, y),
        vmap(lambda r: r, out_dims=1)(x),
        vmap(lambda r: r.clone().add_(1))(x),
        vmap(lambda r: torch.where(r > 0, r, 0.0), chunk_size=2)(x),
        chosen,
        drawn,
        functionalize(lambda t: t.clone().view(-1).add_(1))(x),
    )


@case
def gradients_of_each_sample(d):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 2)).to(d)
    weights = {name: p.detach() for name, p in model.named_parameters()}

    def loss(weights, x, y):
        return F.cross_entropy(functional_call(model, weights, (x[None],)), y[None])

    labels = torch.tensor([0, 1, 0], device=d)
    return vmap(grad(loss), in_dims=(None, 0, 0))(weights, waves(d, 3, 1, 4, 4), labels)


@case
def ensembles(d):
    models = [network(d) for _ in range(3)]
    weights, state = stack_module_state(models)
    base = copy.deepcopy(models[0]).to("meta")
    call = vmap(lambda w, s, x: functional_call(base, (w, s), (x,)), in_dims=(0, 0, None))
    return call(weights, state, waves(d, 2, 3)), functional_call(models[0], {"0.bias": waves(d, 4)}, waves(d, 1, 3))


@case
def forward_mode(d):
    model, one = network(d), torch.ones(2, 3, device=d)
    with fwd.dual_level():
        x = fwd.make_dual(waves(d, 2, 3), one)
        attention = F.scaled_dot_product_attention(x[None], x[None], x[None])
        out = [fwd.unpack_dual(t) for t in (x.sin() * 2, model(x), F.layer_norm(x, (3,)), attention)]
        return [(t.primal, t.tangent) for t in out]


@case
def linearize_and_trace(d):
    x, w = waves(d, 3), waves(d, 3) + 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out, tangent = linearize(lambda x: (x.sin() * x).sum(), x)
    graph = make_fx(lambda x: (x * w + w.sin()).sum())(x)
    w.mul_(2)
    return out, tangent(torch.ones(3, device=d)), [str(node.target) for node in graph.graph.nodes], graph(x)


@case
def old_functional_api(d):
    x = waves(d, 3)

    def cubes(x):
        return (x**3).sum()

    square = [
        functional.jacobian(lambda x: x**2, x, vectorize=v, strategy=s)
        for v, s in ((False, "reverse-mode"), (True, "reverse-mode"), (True, "forward-mode"))
    ]
    return square, functional.hessian(cubes, x), functional.vhp(cubes, x, x), functional.hvp(cubes, x, x)


@case
def gradients_of_gradients(d):
    x, model, data = leaf(d, 3), network(d), leaf(d, 4, 3)
    (first,) = torch.autograd.grad((x**4).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x, create_graph=True)
    second.sum().backward()
    (slope,) = torch.autograd.grad(model(data).sum(), data, create_graph=True)
    ((slope.norm(2, dim=1) - 1) ** 2).mean().backward()
    return first, second, x.grad, gradients(model)


@case
def gradient_interfaces(d):
    x, y = leaf(d, 3), leaf(d, 3)
    unused = torch.autograd.grad(x * 2, [x, y], grad_outputs=torch.ones(3, device=d), allow_unused=True)
    zeros = torch.autograd.grad((x * 3).sum(), [y], allow_unused=True, materialize_grads=True)
    batched = torch.autograd.grad(x**2, x, torch.eye(3, device=d), is_grads_batched=True)
    out = (x * y).sum()
    out.backward(inputs=[x], retain_graph=True)
    out.backward()
    return unused, zeros, batched, x.grad, y.grad


@case
def gradcheck(d):
    x = leaf(d, 3).double().detach().requires_grad_()
    first = torch.autograd.gradcheck(lambda x: x.sin() * 2, x, check_forward_ad=True, check_batched_grad=True)
    return first, torch.autograd.gradgradcheck(lambda x: x.sin() * 2, x)


@mistake
def random_numbers_in_vmap(d):
    vmap(lambda r: r + torch.randn(3, device=d))(waves(d, 2, 3))


@mistake
def item_in_vmap(d):
    vmap(lambda r: r.sum().item())(waves(d, 2, 3))


@mistake
def branch_in_vmap(d):
    vmap(lambda r: r if r.sum() > 0 else -r)(waves(d, 2, 3))


@mistake
def backward_twice(d):
    out = (leaf(d, 3) ** 2).sum()
    out.backward()
    out.backward()


@mistake
def gradient_of_other_shape(d):
    leaf(d, 3).grad = torch.ones(4, device=d)


# --- checkpoints --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_gradients_equal_cpu(embedded, reentrant):
    def checkpointed(d):
        model, x, dropped = network(d), leaf(d, 2, 3), leaf(d, 40)
        checkpoint(model, x, use_reentrant=reentrant).sum().backward()
        checkpoint_sequential(model, 2, x, use_reentrant=reentrant).sum().backward()
        # The mask must be the same when the function runs again.
        kept = checkpoint(lambda t: F.dropout(torch.ones_like(t), 0.5) * t, dropped, use_reentrant=reentrant)
        kept.sum().backward()
        return x.grad, gradients(model), torch.equal(kept.detach(), dropped.grad * dropped.detach())

    assert_same_as_cpu(checkpointed)


# --- functions of one's own ---------------------------------------------------------------------------------------


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        ctx.factor = 2
        return a * b * 2

    @staticmethod
    def backward(ctx, g):
        a, b = ctx.saved_tensors
        return g * b * ctx.factor, g * a * ctx.factor


class InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x.mul_(2)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx, g):
        return g * 2


class Sorted(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        values, indices = x.sort()
        ctx.mark_non_differentiable(indices)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(indices)
        return values, indices

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g, none):
        assert none is None
        (indices,) = ctx.saved_tensors
        return torch.zeros_like(g).scatter(0, indices, g)


class Power(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x, n):
        return x**n

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, ctx.n = inputs
        ctx.save_for_backward(x)
        ctx.save_for_forward(x)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * ctx.n * x ** (ctx.n - 1), None

    @staticmethod
    def jvp(ctx, t, _):
        (x,) = ctx.saved_tensors
        return t * ctx.n * x ** (ctx.n - 1)


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, g):
        raise KeyError("mine")


@case
def custom_functions(d):
    a, b, base = leaf(d, 3), leaf(d, 3), leaf(d, 3)
    Product.apply(a, b).sum().backward()
    (g,) = torch.autograd.grad(Product.apply(a, b).sum(), a, create_graph=True)
    g.sum().backward()
    once = base * 1
    dirty = InPlace.apply(once)
    dirty.sum().backward()
    values, indices = Sorted.apply(a)
    (values * torch.arange(3, device=d)).sum().backward()
    return a.grad, b.grad, base.grad, once, dirty is once, indices


@case
def custom_functions_with_setup_context(d):
    x = waves(d, 3)
    single = grad(lambda x: Power.apply(x, 3).sum())(x), vmap(lambda x: Power.apply(x, 3))(x)
    return single, vmap(grad(lambda x: Power.apply(x, 3)))(x), jvp(lambda x: Power.apply(x, 3), (x,), (x,))


@mistake
def error_in_custom_function(d):
    Failing.apply(leaf(d, 2)).sum().backward()


@mistake
def differentiate_once_differentiable_twice(d):
    x = leaf(d, 3)
    (g,) = torch.autograd.grad((Sorted.apply(x)[0] ** 2).sum(), x, create_graph=True)
    g.sum().backward()


@mistake
def detected_anomaly(d):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.autograd.detect_anomaly():
            (leaf(d, 3) - 5).sqrt().sum().backward()


# --- ops of one's own ---------------------------------------------------------------------------------------------


@torch.library.custom_op("djinn_tests::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


double.register_autograd(lambda ctx, g: g * 2)


@torch.library.custom_op("djinn_tests::by_numpy", mutates_args=())
def double_with_numpy(x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(x.detach().cpu().numpy() * 2).to(x.device)


@torch.library.custom_op("djinn_tests::add_to", mutates_args=("x",))
def add_to(x: torch.Tensor, n: float) -> None:
    x.add_(n)


@torch.library.custom_op("djinn_tests::cpu_only", mutates_args=(), device_types="cpu")
def cpu_only(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@case
def custom_ops(d):
    x, y = leaf(d, 3), waves(d, 3)
    out = torch.ops.djinn_tests.double(x)
    out.sum().backward()
    add_to(y, 2.0)
    return out, x.grad, y, double_with_numpy(y)


def test_op_without_device_kernel_raises(embedded):
    with pytest.raises(UnsupportedOperation, match="djinn_tests::cpu_only"):
        cpu_only(waves(embedded, 3))


# ------------------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # PyTorch's own, for its forward mode
@pytest.mark.parametrize("case", CASES, ids=lambda function: function.__name__)
def test_autograd_result_equals_cpu(embedded, case):
    assert_same_as_cpu(case)


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda function: function.__name__)
def test_autograd_error_equals_cpu(embedded, mistake):
    assert_same_error(mistake)


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")
def test_dual_tensor_copies_to_cpu(embedded):
    """PyTorch compares the sizes of tangents on two devices, for which nothing is sent."""
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(
            torch.ones(2, 1, device=embedded), torch.full((2, 1), 5.0, device=embedded)
        )
        copied = torch.zeros(2, 1)
        copied.copy_(dual)
        assert torch.autograd.forward_ad.unpack_dual(copied).tangent.tolist() == [[5], [5]]
    assert not torch.ops.aten.is_same_size(torch.ones(2, device=embedded), torch.ones(3))
