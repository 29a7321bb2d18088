"""Packing of graphs for a compiler in its own process: the same graph, and nothing that is not on the allow-list."""

from __future__ import annotations

from operator import add, getitem, mul

import msgspec
import pytest
import torch

from djinn.errors import ProtocolError, UnsupportedOperation
from djinn.hooks import CompilerContext, pack, unpack
from djinn_core.ir.values import meta_of

aten = torch.ops.aten
CPU = torch.device("cpu")


def make_context(build, *inputs, **fields):
    graph = torch.fx.Graph()
    nodes = [graph.placeholder(f"x{index}") for index in range(len(inputs))]
    graph.output(build(graph.call_function, *nodes))
    return CompilerContext(torch.fx.GraphModule({}, graph), tuple(meta_of(i) for i in inputs), CPU, **fields)


def test_unpacked_context_computes_same_values():
    def build(call, x, y):
        size = call(aten.sym_size.int, (x, 0))
        more = call(add, (call(mul, (size, 2)), 1))
        made = call(aten.full.default, ([more, 2], 3.0), {"dtype": torch.float64, "device": CPU})
        low = call(getitem, (call(aten.split.Tensor, (y, 1, 1)), 0))
        kept = call(aten.clone.default, (low,), {"memory_format": torch.contiguous_format})
        return made, kept, call(aten.add.Scalar, (x, 2, 0.5))

    inputs = (torch.rand(3, 2), torch.rand(2, 4))
    given = make_context(build, *inputs, writes=(1,), grows={0: (0,)}, threads=3)
    found = unpack(pack(given))
    assert (found.metas, found.writes, dict(found.grows), found.threads) == (given.metas, (1,), {0: (0,)}, 3)
    for ours, theirs in zip(given.graph_module(*inputs), found.graph_module(*inputs), strict=True):
        assert torch.equal(ours, theirs)
        assert ours.dtype == theirs.dtype


@pytest.mark.parametrize("name", ["aten::from_file", "prims::add", "os.system", "eval"])
def test_unpack_refuses_other_functions(name):
    given = msgspec.msgpack.decode(pack(make_context(lambda call, x: (call(aten.relu.default, (x,)),), torch.rand(2))))
    given["nodes"][0]["target"] = name
    with pytest.raises(UnsupportedOperation):
        unpack(msgspec.msgpack.encode(given))


def test_unpack_refuses_invalid_bytes():
    with pytest.raises(ProtocolError):
        unpack(b"\x93abc")


def test_pack_names_unsupported_op():
    with pytest.raises(UnsupportedOperation, match="cannot be sent to a compile process"):
        pack(make_context(lambda call, x: (call(torch.relu, (x,)),), torch.rand(2)))
