"""Make random programs, and run programs and schedules in this process."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

import attrs
import torch

from djinn.testing.builders import ProgramBuilder
from djinn_core.ir.arguments import call_arguments
from djinn_core.ir.graph import Graph, Node
from djinn_core.ir.handles import storage_of
from djinn_core.ir.operators import resolve
from djinn_core.ir.schedule import ExecutionSchedule, Fetch, Free, Receive, Run, Send, Step, Upload
from djinn_core.torch_private import storage_key

_SIDE = 3


def random_graph(seed: int, length: int = 24) -> Graph:
    """Return a graph of `length` random ops on 3x3 matrices: new values, views, writes, random numbers and repetitions.

    `replay` can run every op. About half of the values are dead at the end.
    """
    chance = random.Random(seed)  # noqa: S311 - tests, not secrets
    builder = ProgramBuilder()
    values = [builder.input(_SIDE, _SIDE) for _ in range(3)]
    new_values: list[int] = []
    shape = (_SIDE, _SIDE)
    kinds: tuple[Callable[[], int | None], ...] = (
        lambda: builder.op("aten::add.Tensor", chance.choice(values), chance.choice(values), shape=shape),
        lambda: builder.op("aten::mul.Tensor", chance.choice(values), chance.choice(values), shape=shape),
        lambda: builder.op("aten::mul.Scalar", chance.choice(values), shape=shape, slots=(chance.choice((0.5, 2.0)),)),
        lambda: builder.op("aten::mm", chance.choice(values), chance.choice(values), shape=shape),
        lambda: builder.op("aten::tanh", chance.choice(values), shape=shape),
        lambda: builder.op("aten::rand_like", chance.choice(values), shape=shape, random=True),
        lambda: builder.view("aten::t", chance.choice(values), shape=shape),
        lambda: builder.view("aten::alias", chance.choice(values), shape=shape),
        lambda: _add_in_place(builder, chance.choice(values), chance.choice(values)),
        lambda: _scale_in_place(builder, chance.choice(values)),
    )
    weights = (4, 3, 3, 2, 4, 1, 4, 2, 2, 1)
    for _ in range(length):
        value = chance.choices(kinds, weights)[0]()
        if value is not None:
            values.append(value)
            new_values.append(value)
    builder.drop(*(v for v in new_values if chance.random() < 0.5))
    return builder.graph()


def _add_in_place(builder: ProgramBuilder, target: int, other: int) -> None:
    if storage_of(target) != storage_of(other):  # PyTorch refuses operands that overlap in part
        builder.inplace("aten::add_.Tensor", target, other)


def _scale_in_place(builder: ProgramBuilder, target: int) -> None:
    builder.inplace("aten::mul_.Scalar", target, slots=(0.5,))


def random_inputs(graph: Graph, seed: int = 0) -> dict[int, torch.Tensor]:
    """Return a tensor of small numbers for each input of the graph."""
    generator = torch.Generator().manual_seed(seed)
    return {v: torch.rand(graph.meta(v).shape, generator=generator, dtype=torch.float64) for v in graph.inputs}


def replay(
    graph: Graph,
    inputs: Mapping[int, torch.Tensor],
    order: Sequence[int] | None = None,
    replace: Mapping[int, int] | None = None,
) -> dict[int, torch.Tensor]:
    """Run the nodes on copies of `inputs`, and return all values.

    If `order` is None, run all nodes in program order.
    """
    torch.manual_seed(0)
    values = _copies(inputs)
    for node_id in range(len(graph.nodes)) if order is None else order:
        _run(graph.nodes[node_id], values, replace or {})
    return values


def _copies(tensors: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    """Return copies of tensors. The copies share memory with each other as the tensors do."""
    memories: dict[int, torch.UntypedStorage] = {}
    copies: dict[int, torch.Tensor] = {}
    for value, tensor in tensors.items():
        key = storage_key(tensor)
        if key not in memories:
            memories[key] = tensor.untyped_storage().clone()
        empty = torch.empty(0, dtype=tensor.dtype)
        copies[value] = empty.set_(memories[key], tensor.storage_offset(), tensor.shape, tensor.stride())
    return copies


def _run(node: Node, values: dict[int, torch.Tensor], replace: Mapping[int, int]) -> None:
    operands = [values[replace.get(v, v)] for v in node.inputs]
    args, kwargs = call_arguments(node.form, operands, node.slots, torch.device("cpu"))
    results_of_op = resolve(node.op)(*args, **kwargs)
    results = list(results_of_op) if node.form.sequence else [results_of_op]
    new_results = [r for r, kind in zip(results, node.form.results, strict=True) if kind == "new"]
    values.update(zip(node.outputs, new_results, strict=True))


@attrs.define
class _Device:
    """A simulated device: its steps, its values by handle, and the index of its next step."""

    steps: Sequence[Step]
    values: dict[int, torch.Tensor] = attrs.field(factory=dict)
    at: int = 0


def replay_schedule(
    graph: Graph,
    schedule: ExecutionSchedule,
    inputs: Mapping[int, torch.Tensor],
    resident: Mapping[int, str],
) -> tuple[dict[str, dict[int, torch.Tensor]], dict[int, torch.Tensor]]:
    """Run a schedule on simulated devices. Return the final values of each device, and the fetched values.

    Inputs in `resident` start on their devices. All other inputs are uploaded. A value that one device sends to another
    is copied.

    Raises:
        RuntimeError: the devices wait for each other forever.
    """
    torch.manual_seed(0)
    devices = {name: _Device(steps) for name, steps in schedule.steps.items()}
    for value, name in resident.items():
        devices.setdefault(name, _Device(())).values[value] = inputs[value].clone()
    mail: dict[tuple[str, str, int], list[torch.Tensor]] = {}
    results: dict[int, torch.Tensor] = {}
    while any(d.at < len(d.steps) for d in devices.values()):
        before = sum(d.at for d in devices.values())
        for name, device in devices.items():
            while device.at < len(device.steps) and _step(graph, schedule, name, device, mail, results, inputs):
                device.at += 1
        if sum(d.at for d in devices.values()) == before:
            raise RuntimeError(
                f"the devices wait for each other: { ({n: d.steps[d.at :][:1] for n, d in devices.items()}) }"
            )
    return {name: device.values for name, device in devices.items()}, results


def _step(
    graph: Graph,
    schedule: ExecutionSchedule,
    name: str,
    device: _Device,
    mail: dict[tuple[str, str, int], list[torch.Tensor]],
    fetched: dict[int, torch.Tensor],
    inputs: Mapping[int, torch.Tensor],
) -> bool:
    """Run one step of a device. If it has to wait for another device, return False."""
    match device.steps[device.at]:
        case Run(nodes):
            for node in nodes:
                _run(graph.nodes[node], device.values, schedule.replace)
        case Upload(value):
            device.values[value] = inputs[value].clone()
        case Send(value, target):
            mail.setdefault((name, target, value), []).append(device.values[value].clone())
        case Receive(value, source):
            waiting = mail.get((source, name, value))
            if not waiting:
                return False
            device.values[value] = waiting.pop(0)
        case Free(values):
            for value in values:
                del device.values[value]
        case Fetch(value):
            fetched[value] = device.values[value].clone()
    return True
