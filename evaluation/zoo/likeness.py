"""Compare an evaluation and a training step of a model on the local and the remote device, tensor by tensor."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import attrs
import torch
from torch import nn

import djinn
from evaluation.zoo.building import Architecture, Inputs

REMOTE = "remote_accelerator:0"
# tolerances of `torch.testing.assert_close`, by dtype
TOLERANCES = {torch.float32: (1.3e-6, 1e-5), torch.bfloat16: (1.6e-2, 1e-5), torch.float16: (1e-3, 1e-5)}
Tensors = dict[str, torch.Tensor]


@attrs.frozen
class Likeness:
    """Comparison of remote tensors with local tensors.

    Attributes:
        bitwise: True if every bit is equal.
        distance: largest difference, in units of PyTorch's tolerance for the dtype.
        worst: name of the tensor with the largest difference.
    """

    bitwise: bool = False
    distance: float = math.inf
    worst: str = "nothing to compare"

    @property
    def close(self) -> bool:
        """Return True if all tensors are within the tolerances."""
        return self.distance <= 1


@attrs.frozen
class Verdict:
    """Result of one architecture.

    Attributes:
        ops, round_trips: number of ops and of round trips of the forward pass.
        tokens: True if `generate()` gave equal tokens, or None for models without `generate()`.
        here, remote: local and remote seconds of forward pass and training step.
    """

    name: str
    kind: str
    parameters: int = 0
    ops: int = 0
    round_trips: int = 0
    forward: Likeness = Likeness()
    step: Likeness = Likeness()
    tokens: bool | None = None
    here: float = 0.0
    remote: float = 0.0
    error: str = ""

    @property
    def equal(self) -> bool:
        """Return True if the model ran and is within the tolerances."""
        return not self.error and self.forward.close and self.step.close and self.tokens is not False


@attrs.frozen
class Outcome:
    """Outputs of a model on one side."""

    forward: Tensors
    step: Tensors
    seconds: float
    ops: int = 0
    round_trips: int = 0


def compare(architecture: Architecture, here: str = "cpu") -> Verdict:
    """Build a model, run it on the local device `here` and remotely, and return the comparison."""
    torch.manual_seed(0)
    model, inputs = architecture.make()
    unsettle(model)
    theirs, sent_bytes = copy.deepcopy(model).to(REMOTE), move_inputs(inputs, REMOTE)
    model, inputs = model.to(here), move_inputs(inputs, here)
    remote = outcome(theirs, sent_bytes)
    local = outcome(model, inputs)
    return Verdict(
        name=architecture.name,
        kind=architecture.kind,
        parameters=sum(p.numel() for p in model.parameters()),
        ops=remote.ops,
        round_trips=remote.round_trips,
        forward=likeness(remote.forward, local.forward),
        step=likeness(remote.step, local.step),
        tokens=same_tokens(theirs, sent_bytes, model, inputs) if architecture.writes else None,
        here=local.seconds,
        remote=remote.seconds,
    )


@torch.no_grad()
def unsettle(model: nn.Module) -> None:
    """Add noise to all parameters, because zero parameters would hide differences."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.add_(torch.randn(parameter.shape), alpha=0.05)


def move_inputs(inputs: Any, device: str) -> Any:
    """Return the inputs with every tensor moved to a device."""
    if isinstance(inputs, torch.Tensor):
        return inputs.to(device)
    if isinstance(inputs, Mapping):
        return {name: move_inputs(value, device) for name, value in inputs.items()}
    if isinstance(inputs, (list, tuple)):
        return type(inputs)(move_inputs(value, device) for value in inputs)
    return inputs


def outcome(model: nn.Module, inputs: Inputs) -> Outcome:
    """Evaluate the model, then train it for one step. Return the results on the CPU."""
    start = time.perf_counter()
    before = djinn.stats()
    torch.manual_seed(1)
    with torch.no_grad():
        forward = dict(tensors(model.eval()(**inputs)))
    after = djinn.stats()
    step = train(model, inputs)
    forward, step = on_cpu(forward), on_cpu(step)
    ops, round_trips = (after[name] - before[name] for name in ("ops_captured", "round_trips"))
    return Outcome(forward, step, time.perf_counter() - start, ops, round_trips)


def train(model: nn.Module, inputs: Inputs) -> Tensors:
    """Return loss, gradients, and parameters and buffers after one training step with dropout."""
    torch.manual_seed(1)
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    loss = loss_of(model(**inputs))
    loss.backward()
    gradients = {f"gradient of {n}": p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    optimizer.step()
    return {"loss": loss} | gradients | dict(model.state_dict())


def same_tokens(theirs: nn.Module, sent: Inputs, model: nn.Module, inputs: Inputs) -> bool:
    """Return True if the remote model `theirs` with inputs `sent` and the local `model` generate the same tokens."""
    return generate(theirs, sent) == generate(model, inputs)


def generate(model: nn.Module, inputs: Inputs) -> list[list[int]]:
    """Return seven greedy tokens."""
    settings = {name: value for name, value in inputs.items() if name not in {"labels", "use_cache"}}
    options = {"max_new_tokens": 7, "min_new_tokens": 7, "do_sample": False, "pad_token_id": 0}
    return model.eval().generate(**settings, **options).tolist()


def loss_of(output: Any) -> torch.Tensor:
    """Return an output's loss or, without one, the sum of its tensors' mean squares, each scaled to less than 1."""
    loss = output.get("loss") if isinstance(output, Mapping) else None
    if loss is not None:
        return loss
    parts = [t.square().mean() for _, t in tensors(output) if t.requires_grad]
    return torch.stack([part / (1 + part.detach()) for part in parts]).sum()


def tensors(output: Any, name: str = "output") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the named tensors in a model's output, caches included."""
    if isinstance(output, torch.Tensor):
        yield name, output
    elif isinstance(output, Mapping):
        yield from _all(((f"{name}.{key}", value) for key, value in output.items()))
    elif isinstance(output, (list, tuple)):
        yield from _all(((f"{name}[{i}]", value) for i, value in enumerate(output)))
    elif hasattr(output, "__dict__") and not isinstance(output, (nn.Module, type)):
        yield from _all(((f"{name}.{key}", value) for key, value in vars(output).items()))


def _all(parts: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, part in parts:
        yield from tensors(part, name)


def on_cpu(found: Tensors) -> Tensors:
    """Return CPU copies without gradients."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in found.items()}


def likeness(remote: Tensors, local: Tensors) -> Likeness:
    """Compare remote tensors with local ones."""
    if remote.keys() != local.keys():
        return Likeness(worst=f"only on one side: {sorted(remote.keys() ^ local.keys())}")
    distances = {name: distance(remote[name], expected) for name, expected in local.items()}
    worst = max(distances, key=lambda name: distances[name])
    bitwise = all(same_bits(remote[name], expected) for name, expected in local.items())
    return Likeness(bitwise, distances[worst], worst)


def distance(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference of two tensors, in units of PyTorch's tolerance."""
    if (actual.shape, actual.dtype) != (expected.shape, expected.dtype):
        return math.inf
    if not expected.numel() or actual.equal(expected):
        return 0.0
    if not expected.is_floating_point():
        return math.inf
    relative, absolute = TOLERANCES[expected.dtype]
    off = (actual.double() - expected.double()).abs() / (absolute + relative * expected.double().abs())
    same = (actual == expected) | (actual.isnan() & expected.isnan())
    return off.masked_fill(same, 0.0).nan_to_num(nan=math.inf).max().item()


def same_bits(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Return True if two tensors are bitwise equal."""
    if (actual.shape, actual.dtype) != (expected.shape, expected.dtype):
        return False
    one, other = (t.contiguous().reshape(-1).view(torch.uint8) for t in (actual, expected))
    return one.equal(other)
