"""Attribution of ops to modules, in forward, in backward and in checkpoint recomputation; and what it must not disturb."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.utils.checkpoint import checkpoint

import djinn
from djinn_client.interception.native.library import ops
from djinn_client.interception.recording.recorder import current


class Attention(nn.Module):
    def __init__(self, device):
        super().__init__()
        self.qkv = nn.Linear(4, 4, device=device)

    def forward(self, x):
        return torch.tanh(self.qkv(x))


class Block(nn.Module):
    def __init__(self, device):
        super().__init__()
        self.attn = Attention(device)

    def forward(self, x):
        return x + self.attn(x)


class Model(nn.Module):
    def __init__(self, device, recompute=False):
        super().__init__()
        self.h = nn.ModuleList(Block(device) for _ in range(3))
        self.recompute = recompute

    def forward(self, x):
        for block in self.h:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return x.sigmoid()


def paths(program, op):
    """Return path and direction of each instruction of an op."""
    found = [program.module_path(i) for i, call in enumerate(program.calls) if call.op == op]
    return [(str(p), p.path, p.root) if p is not None else None for p in found]


def expected_path(i, where="attn", module="Attention"):
    path = f"h.{i}.{where}"
    return f"{path} ({module})", path, "Model"


def backward(entry):
    return f"the backward pass of {entry[0]}", *entry[1:]


@pytest.fixture
def x(embedded):
    return torch.ones(2, 4, device=embedded)


def test_module_path_in_forward_and_backward(x):
    model = Model(x.device)
    with djinn.capture() as captured:
        model(x).sum().backward()
        x.exp()
    program = captured.program
    assert paths(program, "aten::tanh") == [expected_path(i) for i in range(3)]
    assert paths(program, "aten::sigmoid") == [("Model", "", "Model")]
    assert paths(program, "aten::tanh_backward") == [backward(expected_path(i)) for i in (2, 1, 0)]
    assert backward(expected_path(1, "attn.qkv", "Linear")) in paths(program, "aten::mm")
    assert paths(program, "aten::exp") == [None]
    assert current().module is None


def test_module_path_of_recomputed_ops(x):
    model = Model(x.device, recompute=True)
    x.requires_grad_()
    with djinn.capture() as captured:
        model(x).sum().backward()
    program = captured.program
    assert paths(program, "aten::tanh_backward") == [backward(expected_path(i)) for i in (2, 1, 0)]
    assert paths(program, "aten::tanh") == [
        *(expected_path(i) for i in range(3)),
        *(backward(expected_path(i)) for i in (2, 1, 0)),
    ]


def test_module_path_of_shared_module(x):
    shared = Attention(x.device)

    class User(nn.Module):
        def forward(self, x):
            return shared(x)

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.shared, self.user = shared, User()

        def forward(self, x):
            return self.user(x)

    with djinn.capture() as captured:
        models = [Outer(), User()]
        for model in models:
            model(x)
    names = [str(captured.program.module_path(i)) for i, c in enumerate(captured.program.calls) if c.op == "aten::tanh"]
    assert names == ["shared (Attention)", "<Attention> (Attention)"]


def test_exception_resets_path_and_frees_module(x):
    model = Model(x.device)
    with pytest.raises(RuntimeError):
        model(x.new_ones(3, 3))
    assert current().module is None
    with torch.no_grad(), pytest.raises(RuntimeError):
        model(x.new_ones(3, 3))
    assert current().module is None
    model(x)
    gone = weakref.ref(model.h[0])
    del model
    gc.collect()
    assert gone() is None
    x.sum().item()


def test_module_path_is_thread_local(x):
    inside, other = threading.Event(), threading.Event()
    seen = []

    class WaitingModule(nn.Module):
        def forward(self, x):
            inside.set()
            assert other.wait(300)
            return x

    def read_other_module():
        assert inside.wait(300)
        seen.append(current().module)
        other.set()

    thread = threading.Thread(target=read_other_module)
    thread.start()
    WaitingModule()(x)
    thread.join()
    assert seen == [None]


def test_op_failure_names_module(x):
    class EmbeddingLayer(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(3, 4, device=x.device)

        def forward(self, i):
            return self.table(i)

    model = nn.Sequential(nn.Sequential(EmbeddingLayer()))
    with pytest.raises(IndexError) as caught:
        model(torch.tensor([7], device=x.device)).sum().item()
    assert caught.value.module_path == "0.0.table"
    assert "in 0.0.table (Embedding)" in str(caught.value)


def test_backward_failure_names_module(x):
    class FailingBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, gradient):
            return gradient[torch.tensor([9, 9], device=gradient.device)]

    class Head(nn.Module):
        def forward(self, x):
            return FailingBackward.apply(x)

    model = nn.Sequential(nn.Linear(4, 4, device=x.device), Head())
    model(x).sum().backward()
    with pytest.raises(djinn.errors.RemoteIndexError, match=r"in the backward pass of 1 \(Head\)") as caught:
        model[0].weight.grad.cpu()
    assert caught.value.module_path == "1"
    model(x).sum().item()


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_module_copies_and_pickles_work():
    model = Model("cpu")
    x = torch.ones(2, 4)
    expected = model(x)
    assert set(vars(model)) == set(vars(copy.deepcopy(model)))
    assert torch.equal(pickle.loads(pickle.dumps(model))(x), expected)
    assert torch.allclose(torch.jit.trace(model, x)(x), expected)
    assert torch.allclose(torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))(x), torch.zeros(2, 4), atol=9)
    assert torch.allclose(torch.fx.symbolic_trace(nn.Sequential(model.h[0]))(x), model.h[0](x))
    exported = torch.export.export(model, (x,))
    assert torch.allclose(exported.module()(x), expected)
    stacks = [n.meta["nn_module_stack"] for n in exported.graph.nodes if n.op == "call_function" and "tanh" in n.name]
    assert [list(s.values())[-1][0].removeprefix("L['self'].") for s in stacks] == [f"h.{i}.attn" for i in range(3)]


def test_compiled_module_is_one_graph():
    model = Model("cpu")
    x = torch.ones(2, 4)
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter)
    assert torch.allclose(compiled(x), model(x))
    assert counter.frame_count == 1, "no graph break"
    seen = []

    class GraphBreak(nn.Module):
        def forward(self, x):
            x = model.h[0](x)
            torch._dynamo.graph_break()
            seen.append(current().module)
            return model.h[1](x)

    with torch.no_grad():
        assert torch.allclose(torch.compile(GraphBreak(), backend="eager")(x), model.h[1](model.h[0](x)))
    assert len(seen) == 1


@pytest.fixture
def few_sites():
    ops.limit_sites(50)
    yield
    ops.limit_sites(8192)


def test_code_cache_is_bounded(x, few_sites):
    made = []
    for i in range(200):
        code = compile("x + 1", f"<cell {i}>", "exec")
        made.append(weakref.ref(code))
        exec(code, {"x": x})
        x.sum().item()
        del code
    assert sum(one() is not None for one in made) <= 100
    with djinn.capture() as captured:
        exec(compile("\n\nx + 1", "<cell>", "exec"), {"x": x})
    assert captured.program.site(0) == "<cell>:3 in <module>"
