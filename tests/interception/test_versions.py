"""`_version` is incremented as in eager PyTorch, so that autograd detects overwritten tensors."""

from __future__ import annotations

import pytest
import torch
from sameness import assert_same_as_cpu, assert_same_error, numbers, run
from torch import nn

aten = torch.ops.aten


def list_ops():
    """Return all list ops that write: in-place ops and `out=` overloads."""
    names = [name for name in dir(aten) if name.startswith("_foreach_")]
    overloads = [getattr(packet, o) for packet in (getattr(aten, n) for n in names) for o in packet.overloads()]
    return [
        op for op in overloads if any(a.alias_info is not None and a.alias_info.is_write for a in op._schema.arguments)
    ]


def arguments(op, device):
    """Return arguments for a list op. Each tensor list has a repeated tensor and a view of another element."""
    positional, named = [], {}
    for argument in op._schema.arguments:
        kind = str(argument.type)
        if argument.has_default_value():
            continue
        if kind == "List[Tensor]":
            first, second = numbers(device, 4) + 1, numbers(device, 4) + 1
            value = [first, second, second[:4], first]
        elif kind == "Tensor":  # numbers, one for each element, or one for all
            value = torch.ones(4) if "addc" in op.name() else torch.tensor(2.0)
        elif kind.startswith("List["):
            value = [2.0] * 4
        else:
            value = 1 if kind == "int" else 2.0
        if argument.kwarg_only:
            named[argument.name] = value
        else:
            positional.append(value)
    return positional, named


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_list_op_increments_versions_of_written_tensors(embedded, mode):
    for op in list_ops():
        found = []
        for device in ("cpu", embedded):
            positional, named = arguments(op, device)
            with mode():
                op(*positional, **named)
            tensors = [t for value in (*positional, *named.values()) if isinstance(value, list) for t in value]
            found.append([t._version for t in tensors if isinstance(t, torch.Tensor)])
        assert found[0] == found[1], op.name()
        assert any(found[0]), op.name()


def fused(name, device):
    lists = [[numbers(device, 3) + 1] for _ in range(5)]
    steps = [torch.ones((), device=device)]
    options = {"lr": 0.1, "weight_decay": 0.0, "maximize": False}
    if name == "_fused_sgd_":
        options |= {"momentum": 0.9, "dampening": 0.0, "nesterov": False, "is_first_step": True}
        torch._fused_sgd_(*lists[:3], **options)
    elif name == "_fused_adagrad_":
        torch._fused_adagrad_(*lists[:3], steps, **options, lr_decay=0.0, eps=1e-8)
    else:
        options |= {"beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "amsgrad": True}
        getattr(torch, name)(*lists, steps, **options)
    return [t._version for one in (*lists, steps) for t in one]


def unscale_gradients(device):
    gradient, found, scale = numbers(device, 3), torch.zeros(1, device=device), torch.ones(1, device=device)
    torch._amp_foreach_non_finite_check_and_unscale_([gradient, gradient], found, scale)
    torch._amp_update_scale_(scale, torch.zeros(1, dtype=torch.int32, device=device), found, 2.0, 0.5, 2000)
    return gradient._version, found._version, scale._version


def normalize_rows(device):
    tensors = [numbers(device, 2, 3, 4), *(torch.ones(3, device=device) for _ in range(4))]
    torch.batch_norm(*tensors, True, 0.1, 1e-5, False)
    return [t._version for t in tensors]


def embedded_rows(device):
    table = numbers(device, 4, 3)
    nn.functional.embedding(torch.tensor([0, 1], device=device), table, max_norm=1.0)
    return table._version


def copied_from_here(device):
    target = numbers(device, 3)
    torch._foreach_copy_([target, target[1:]], [torch.ones(3), torch.zeros(2)])
    return target._version, target


def detached(device):
    base = numbers(device, 4)
    torch._foreach_add_([base.detach()[:2], base.data], 1.0)
    return base._version, base


def split(device):
    made = [torch.zeros(2, 3, device=device), torch.zeros(1, 3, device=device)]
    torch.split_with_sizes_copy(numbers(device, 3, 3), [2, 1], out=made)
    return [t._version for t in made]


def functionalized(device):
    given = numbers(device, 3)
    torch.func.functionalize(lambda t: torch._foreach_mul_([t], 2.0))(given)
    return given._version, given


@pytest.mark.parametrize("name", ["_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_"])
def test_fused_optimizers_leave_versions_unchanged(embedded, name):
    assert fused(name, embedded) == fused(name, "cpu")


@pytest.mark.parametrize(
    "case", [unscale_gradients, normalize_rows, embedded_rows, copied_from_here, detached, split, functionalized]
)
def test_ops_increment_versions_as_on_the_cpu(embedded, case):
    assert_same_as_cpu(case)


# --- autograd ------------------------------------------------------------------------------------------------------------


def view_after_write(device):
    w = torch.ones(4, device=device, requires_grad=True)
    b = w * 1
    v = b[:2]
    torch._foreach_mul_([b], 2.0)
    (v.sum() + b.sum()).backward()
    return w.grad


def base_after_write_of_views(device):
    w = torch.ones(4, device=device, requires_grad=True)
    b = w * 1
    torch._foreach_mul_([b[:2], b[1:]], [2.0, 3.0])
    b.square().sum().backward()
    return w.grad


def gradients_of_two_graphs(device):
    x, y = (torch.ones(3, device=device, requires_grad=True) for _ in range(2))
    a, b = x * 2, y * 3
    torch._foreach_add_([a, b], [b, a])
    (a * b).sum().backward()
    return x.grad, y.grad


def clip_gradients(device):
    p = torch.full((3,), 2.0, device=device, requires_grad=True)
    p.square().sum().backward()
    view = p.grad[:1]
    nn.utils.clip_grad_norm_([p], 1.0)
    return view._version, p.grad


def average_parameters(device):
    model = nn.Linear(2, 2).to(device)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(0.5)
    ema = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    before = [p._version for p in ema.module.parameters()]
    for _ in range(2):
        ema.update_parameters(model)
    return [p._version - b for p, b in zip(ema.module.parameters(), before, strict=True)]


def versions_after_steps(device):
    p = torch.full((3,), 2.0, device=device, requires_grad=True)
    versions = []
    for kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.NAdam):
        optimizer = kind([p], lr=0.1, foreach=True)
        p.grad = torch.ones_like(p)
        optimizer.step()
        versions.append(p._version)
    return versions


@pytest.mark.parametrize(
    "case",
    [
        view_after_write,
        base_after_write_of_views,
        gradients_of_two_graphs,
        clip_gradients,
        average_parameters,
        versions_after_steps,
    ],
)
def test_gradients_account_for_writes_by_list_ops(embedded, case):
    assert_same_as_cpu(case)


def adversarial_training(device):
    generator, critic = nn.Linear(2, 2).to(device), nn.Linear(2, 1).to(device)
    optimizer = torch.optim.Adam(critic.parameters(), 0.1)
    fake = generator(torch.ones(3, 2, device=device))
    loss = critic(fake.detach()).mean()
    late = -critic(fake).square().mean()
    loss.backward()
    optimizer.step()
    late.backward()


def write_to_saved_list(device):
    w = torch.ones(3, device=device, requires_grad=True)
    b = w * 1
    loss = b.square().sum()
    torch._foreach_zero_([b])
    loss.backward()


def leaf_in_list(device):
    torch._foreach_mul_([torch.ones(3, device=device, requires_grad=True)], 2.0)


def step_with_retained_graph(device):
    w = torch.ones(3, device=device, requires_grad=True)
    loss = (w * w).sum()
    loss.backward(retain_graph=True)
    torch.optim.SGD([w], 0.1, foreach=True).step()
    loss.backward()


def write_to_part_of_saved(device):
    w = torch.ones(4, device=device, requires_grad=True)
    b = w.exp()
    torch._foreach_neg_([b[1:3].detach()])
    b.sum().backward()


def write_to_inference_tensor(device):
    with torch.inference_mode():
        given = torch.ones(3, device=device)
    torch._foreach_mul_([given], 2.0)


@pytest.mark.parametrize(
    "case",
    [
        adversarial_training,
        write_to_saved_list,
        leaf_in_list,
        step_with_retained_graph,
        write_to_part_of_saved,
        write_to_inference_tensor,
    ],
)
def test_backward_refuses_overwritten_tensors(embedded, case):
    assert_same_error(case)
    with pytest.raises(RuntimeError, match=r"inplace operation|in-place operation|Inplace update"):
        run(case, embedded)
