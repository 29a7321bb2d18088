"""Nested tensors of both layouts on the device: results equal the CPU's; unsupported ops are refused by name."""

from __future__ import annotations

import copy
import io
import re

import pytest
import torch
from compared_layouts import equal, plain
from torch import nested
from torch.nn import functional

import djinn

pytestmark = pytest.mark.filterwarnings("ignore:(The PyTorch API of nested tensors|.*is_fx_tracing)")

JAGGED, STRIDED = torch.jagged, torch.strided


def tensors(device):
    """Return two tensors, of shapes (2, 8) and (3, 8)."""
    return [torch.arange(16.0).reshape(2, 8).sin().to(device), torch.arange(24.0).reshape(3, 8).cos().to(device)]


def strided(device):
    return nested.as_nested_tensor(tensors(device))


def jagged(device):
    return nested.as_nested_tensor(tensors(device), layout=JAGGED)


def write_through_views(device):
    """Return a nested tensor after writes through its views."""
    whole = strided(device)
    whole.chunk(2, -1)[1].unbind()[0].mul_(10)
    whole.transpose(1, 2).unbind()[1].add_(100)
    whole.view(2, -1, 2, 4).unbind()[0].sub_(3)
    whole.narrow(0, 1, 1).unbind()[0].mul_(-1)
    whole.unsqueeze(1).unbind()[1].add_(7)
    whole.narrow(0, 1, 1).view(1, -1, 2, 4).unbind()[0].add_(11)
    whole.select(2, 1).unbind()[0].zero_()
    whole[0].add_(1000)
    return whole


def view_properties(device):
    whole, columns = strided(device), strided(device).transpose(1, 2)
    views = [
        *whole.chunk(2, -1),
        columns,
        columns.transpose(1, 2),
        columns.clone(),
        columns.contiguous(),
    ]
    views += [columns + columns, columns == 0, torch.empty_like(columns), columns.cpu()]
    return [[v.is_contiguous() for v in views], *[v._nested_tensor_strides() for v in views]]


def weight(device, *shape):
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape).mul(0.1).sin().to(device)


def parts(made):
    """Return the tensors of a nested tensor; for a jagged one, its values and offsets."""
    return [made.values(), made.offsets()] if made.layout == JAGGED else list(made.unbind())


def saved(made, where):
    file = io.BytesIO()
    torch.save({"it": made}, file)
    file.seek(0)
    return torch.load(file, map_location=where, weights_only=False)["it"]


def attention(layout):
    def case(device):
        q, k, v = (
            nested.as_nested_tensor([t * n for t in tensors(device)], layout=layout).requires_grad_() for n in (1, 2, 3)
        )
        heads = [
            t.unflatten(-1, [2, 4]).transpose(1, 2) if layout == JAGGED else t.reshape(2, -1, 2, 4).transpose(1, 2)
            for t in (q, k, v)
        ]
        heads = heads if layout == JAGGED else [t.contiguous() for t in heads]
        out = functional.scaled_dot_product_attention(*heads).transpose(1, 2)
        if layout == JAGGED:
            out.sin().values().sum().backward()
        else:
            nested.to_padded_tensor(out.contiguous().sin(), 0.0).sum().backward()
        return [*parts(out.contiguous()), *parts(q.grad), *parts(v.grad)]

    return case


def gradients(loss, layout=STRIDED):
    def case(device):
        given = [t.requires_grad_() for t in tensors(device)]
        w = weight(device, 5, 8).requires_grad_()
        loss(nested.as_nested_tensor(given, layout=layout), w).backward()
        return [*[t.grad for t in given], w.grad]

    return case


def padded(made):
    return nested.to_padded_tensor(made, 0.5)


def layer(device):
    torch.manual_seed(0)
    made = torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.Linear(8, 4), torch.nn.ReLU(), torch.nn.Linear(4, 8)).to(
        device
    )
    padded(made(strided(device))).sum().backward()
    return [p.grad for p in made.parameters()]


CASES = {
    "of tensors": lambda d: parts(nested.nested_tensor(tensors(d))),
    "of tensors of the CPU": lambda d: parts(nested.nested_tensor(tensors("cpu"), device=d)),
    "of lists": lambda d: parts(nested.nested_tensor([[1.0, 2.0], [3.0]], device=d)),
    "of another dtype": lambda d: parts(nested.nested_tensor(tensors(d), dtype=torch.float64)),
    "moved": lambda d: parts(strided("cpu").to(d)),
    "facts": lambda d: [strided(d).is_nested, str(strided(d).layout), strided(d).dim(), strided(d).size(0), strided(d).size(2), strided(d).numel(), strided(d).is_contiguous()],
    "size tables": lambda d: [strided(d)._nested_tensor_size(), strided(d)._nested_tensor_strides(), strided(d)._nested_tensor_storage_offsets()],
    "of what a mask keeps": lambda d: parts(torch._nested_tensor_from_mask(weight(d, 2, 3, 4), torch.tensor([[True, False, False], [True, True, False]]).to(d))),
    "chosen": lambda d: [strided(d)[1], strided(d)[0, 1]],
    "padded": lambda d: [padded(strided(d)), nested.to_padded_tensor(strided(d), 1.0, (3, 4, 9))],
    "arithmetic": lambda d: [*parts(strided(d) + strided(d)), *parts(strided(d) * 2 - strided(d)), *parts(strided(d) / 3)],
    "unary": lambda d: [*parts(strided(d).relu()), *parts(functional.gelu(strided(d))), *parts(strided(d).tanh()), *parts(-strided(d))],
    "in place": lambda d: (s := strided(d), s.mul_(2), s.relu_(), parts(s))[3],
    "linear": lambda d: parts(functional.linear(strided(d), weight(d, 5, 8), weight(d, 5))),
    "matmul": lambda d: [*parts(strided(d) @ strided(d).transpose(1, 2))],
    "softmax": lambda d: parts(strided(d).softmax(-1)),
    "layer_norm": lambda d: parts(functional.layer_norm(strided(d), (8,), weight(d, 8), weight(d, 8))),
    "sum": lambda d: parts(strided(d).sum(-1, keepdim=True)),
    "transpose": lambda d: parts(strided(d).transpose(1, 2)),
    "written through views": lambda d: parts(write_through_views(d)),
    "facts of views": view_properties,
    "views of views": lambda d: [*parts(strided(d).transpose(1, 2).reshape(2, 8, -1, 1)), *parts(strided(d).chunk(2, -1)[1].reshape(2, -1, 2, 2))],
    "ops on views": lambda d: [*parts((t := strided(d).transpose(1, 2)) + t), *parts(t / 3), *parts(t == 0), *parts(t.softmax(-1)), *parts(strided(d) @ t), t.values()],
    "reshape": lambda d: [*parts(strided(d).reshape(2, -1, 2, 4)), *parts(torch.reshape(strided(d), (2, -1, 2, 4))), *parts(strided(d).view(2, -1, 2, 4))],
    "chunk": lambda d: [part for one in strided(d).chunk(2, -1) for part in parts(one)],
    "split": lambda d: [part for one in torch.split(strided(d), [3, 5], -1) for part in parts(one)],
    "narrow": lambda d: parts(strided(d).narrow(0, 1, 1)),
    "moved, not contiguous": lambda d: [*parts(strided("cpu").transpose(1, 2).to(d)), *parts(strided("cpu").narrow(0, 1, 1).to(d))],
    "dropout": lambda d: parts(functional.dropout(strided(d), 0.0)),
    "copies": lambda d: [*parts(strided(d).clone()), *parts(strided(d).detach()), *parts(torch.zeros_like(strided(d)).copy_(strided(d)))],
    "converted": lambda d: [*parts(strided(d).double()), *parts(strided(d).half()), *parts(torch.ones_like(strided(d)))],
    "saved": lambda d: parts(saved(strided(d), d)),
    "printed": lambda d: repr(nested.nested_tensor([[1.0, 2.0], [3.0]], device=d)).replace(", device='remote_accelerator:0'", ""),
    "gradients of padding": gradients(lambda n, w: (padded(n) @ w.t()).sum()),
    "gradients of linear": gradients(lambda n, w: padded(functional.linear(n, w).sin()).sum()),
    "gradients of softmax": gradients(lambda n, w: (padded(functional.linear(n, w).softmax(-1)) ** 2).sum()),
    "gradients of matmul": gradients(lambda n, w: padded(n @ n.transpose(1, 2)).sum() + w.sum()),
    "gradients of unbind": gradients(lambda n, w: sum(t.square().sum() for t in n.unbind()) + w.sum()),
    "gradients of one tensor": gradients(lambda n, w: n.unbind()[1].square().sum() + w.sum()),
    "gradients of split": gradients(lambda n, w: sum(padded(t.contiguous().sin()).sum() for t in torch.split(n, [3, 5], -1)) + w.sum()),
    "gradients of a part": gradients(lambda n, w: padded(torch.split(n, [3, 5], -1)[1].contiguous().sin()).sum() + w.sum()),
    "gradients of layers": layer,
    "attention": attention(STRIDED),
    "jagged of tensors": lambda d: parts(nested.nested_tensor(tensors(d), layout=JAGGED)),
    "jagged of lists": lambda d: parts(nested.nested_tensor([[1.0, 2.0], [3.0]], layout=JAGGED, device=d)),
    "jagged of values and offsets": lambda d: parts(nested.nested_tensor_from_jagged(torch.cat(tensors(d)), torch.tensor([0, 2, 5]).to(d))),
    "jagged, narrowed": lambda d: parts(nested.narrow(weight(d, 2, 5, 4), 1, torch.tensor([0, 1]).to(d), torch.tensor([2, 3]).to(d), layout=JAGGED).contiguous()),
    "jagged, moved": lambda d: [*parts(jagged("cpu").to(d)), *parts(jagged(d).cpu()), *parts(jagged(d).to("cpu").to(d))],
    "jagged, unbound": lambda d: [*jagged(d).unbind(), jagged(d)[1]],
    "jagged, padded": lambda d: [jagged(d).to_padded_tensor(0.5), padded(jagged(d))],
    "jagged ops": lambda d: [parts((n := jagged(d)) * 2 + n), parts(jagged(d) @ weight(d, 8, 3)), parts(jagged(d).softmax(-1)), jagged(d).sum(1), jagged(d).mean(1), jagged(d).sum()],
    "jagged layer_norm": lambda d: parts(functional.layer_norm(jagged(d), (8,))),
    "jagged, saved": lambda d: parts(saved(jagged(d), d)),
    "jagged copies": lambda d: [*parts(jagged(d).clone()), *parts(copy.deepcopy(jagged(d))), *parts(torch.zeros_like(jagged(d)))],
    "jagged gradients": gradients(lambda n, w: functional.linear(n, w).sin().sum(), JAGGED),
    "jagged attention": attention(JAGGED),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_nested_ops_equal_cpu(embedded, case):
    here, there = plain(CASES[case]("cpu")), plain(CASES[case](embedded))
    assert equal(here, there), (here, there)


VIEWS = {
    "unary": lambda n: n.transpose(1, 2).cos(),
    "in place": lambda n: n.transpose(1, 2).mul_(2),
    "linear": lambda n: functional.linear(n.transpose(1, 2), torch.ones(3, 2, device=n.device)),
    "padded": lambda n: padded(n.transpose(1, 2)),
    "other strides": lambda n: n.transpose(1, 2) + n,
    "chunk of a view": lambda n: n.transpose(1, 2).chunk(2, -1),
    "split of a view": lambda n: n.chunk(2, -1)[0].split_with_sizes([1, 3], -1),
    "chunk of rows": lambda n: n.chunk(2, 1),
    "slice": lambda n: n[:],
    "another memory format": lambda n: n.clone(memory_format=torch.channels_last),
    "a mask with gaps": lambda n: torch._nested_tensor_from_mask(
        weight(n.device, 1, 3, 4), torch.tensor([[True, False, True]]).to(n.device)
    ),
    "first dimension": lambda n: n.transpose(0, 1),
    "no such dimension": lambda n: n.transpose(1, 3),
    "no such tensor": lambda n: n[2],
}


@pytest.mark.parametrize("name", VIEWS)
def test_noncontiguous_nested_tensors_raise_as_on_cpu(embedded, name):
    with pytest.raises((RuntimeError, IndexError)) as here:
        VIEWS[name](strided("cpu"))
    with pytest.raises(type(here.value), match=None if name == "slice" else re.escape(str(here.value)[:45])):
        VIEWS[name](strided(embedded))


@pytest.mark.parametrize("ask", [lambda n: n.size(), lambda n: n.size(1), lambda n: n + jagged(n.device)])
def test_nested_errors_equal_cpu(embedded, ask):
    with pytest.raises(RuntimeError) as here:
        ask(strided("cpu"))
    with pytest.raises(RuntimeError) as there:
        ask(strided(embedded))
    assert type(here.value) is type(there.value)


def test_nested_chunks_have_no_gradient_as_on_cpu(embedded):
    for device in ("cpu", embedded):
        part = strided(device).clone().requires_grad_().chunk(2, -1)[0]
        with pytest.raises(RuntimeError, match="Nested Strided Tensor doesn't support chunk backward"):
            part.backward(part.detach().contiguous())


def test_views_of_nested_tensors_take_no_round_trip(embedded):
    n, before = strided(embedded), djinn.stats()["round_trips"]
    n.transpose(1, 2).transpose(1, 2).chunk(2, -1)[1][0].mul_(2)
    assert djinn.stats()["round_trips"] == before


@pytest.mark.parametrize("refused", [lambda n: n.cumsum(1), lambda n: n.sort(), lambda n: n.exp2()])
def test_unsupported_nested_ops_are_refused_by_name(embedded, refused):
    n = strided(embedded)
    with pytest.raises(
        djinn.errors.UnsupportedOperation,
        match=r"aten::\w+.* does not support nested tensors on remote_accelerator.*unbind",
    ):
        refused(n)
    assert padded(n).sum().item() == padded(strided("cpu")).sum().item()
