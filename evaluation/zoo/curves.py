"""Training runs: a CNN on handwritten digits and a small GPT on Python's documentation, local and remote."""

from __future__ import annotations

import contextlib
import copy
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from types import MappingProxyType

import attrs
import torch
from torch import nn
from torch.nn import functional

from evaluation.zoo.likeness import REMOTE, same_bits

Optimize = Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]
Batch = tuple[torch.Tensor, torch.Tensor]

OPTIMIZERS: Mapping[str, Optimize] = MappingProxyType({
    "sgd with momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-4),
    "sgd, nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=2e-3),
    "adamw, one by one": lambda p: torch.optim.AdamW(p, lr=2e-3, foreach=False),
    "adamw, foreach": lambda p: torch.optim.AdamW(p, lr=2e-3, foreach=True),
    "adamw, fused": lambda p: torch.optim.AdamW(p, lr=2e-3, fused=True),
})  # fmt: skip

# For losses around 1. With equal kernels there is no difference. Otherwise the last bit differs at first, and training
# amplifies the difference: 1e-7 becomes 1e-5 in 200 steps. Under autocast, PyTorch's CPU policy keeps other ops in
# single precision than the CUDA policy, which the remote device follows. bfloat16 has 8 bits, so one step's loss
# differs by 1e-3.
TOLERANCE, REDUCED_TOLERANCE = 1e-3, 5e-2


@attrs.frozen
class Task:
    """A training task: a model, its loss, and the batches."""

    name: str
    model: nn.Module
    loss: Callable[[nn.Module, Batch], torch.Tensor]
    batches: tuple[Batch, ...]

    def batch(self, step: int) -> Batch:
        """Return the batch of this step. Batches repeat cyclically."""
        return self.batches[step % len(self.batches)]


@attrs.frozen
class Comparison:
    """Local and remote loss curves of a training run.

    Attributes:
        tolerance: maximum difference of two losses.
        largest: the largest difference of two losses. last: the largest difference of parameters after the last step.
        apart: the first step with different losses, or None if all losses are bitwise equal.
        here, remote: seconds of the local and of the remote run.
    """

    task: str
    optimizer: str
    steps: int
    tolerance: float
    first_loss: float
    last_loss: float
    largest: float
    last: float
    apart: int | None
    bitwise: bool
    here: float
    remote: float

    @property
    def equal(self) -> bool:
        """Return True if the remote curve equals the local curve and decreases. A run that learns nothing proves nothing."""
        return self.largest <= self.tolerance and self.last_loss < 0.9 * self.first_loss


@attrs.frozen
class Run:
    """Losses of each step, the final parameters, and the duration in seconds."""

    losses: torch.Tensor
    parameters: dict[str, torch.Tensor]
    seconds: float


def digits() -> Task:
    """Return a CNN with batch norm and dropout for digits."""
    from sklearn.datasets import load_digits

    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(2))
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1)[order] / 16
    labels = torch.tensor(data.target)[order]
    torch.manual_seed(2)
    network = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(0.2), nn.Linear(256, 10),
    )  # fmt: skip
    batches = tuple(zip(images.split(64), labels.split(64), strict=True))
    return Task("CNN on digits", network, _classify, batches)


def _classify(model: nn.Module, batch: Batch) -> torch.Tensor:
    images, labels = batch
    # explicitly in single precision: under autocast, CUDA's policy casts here, and the CPU's does not
    return functional.cross_entropy(model(images).float(), labels)


def prose(attention: str = "eager") -> Task:
    """Return a character GPT on Python's documentation."""
    from pydoc_data.topics import topics

    from transformers import GPT2Config, GPT2LMHeadModel

    text = " ".join(topics[name] for name in sorted(topics)).encode("ascii", "ignore")[: 64 * 65 * 8]
    rows = torch.tensor(list(text)).view(64, 8, 65)
    torch.manual_seed(3)
    sizes = {"vocab_size": 128, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    dropout = 0.0 if attention == "sdpa" else 0.1  # the CPU's fused attention has no dropout
    config = GPT2Config(
        **sizes, attn_implementation=attention, attn_pdrop=dropout, resid_pdrop=dropout, embd_pdrop=dropout,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    batches = tuple((row[:, :-1].contiguous(), row[:, 1:].contiguous()) for row in rows)
    return Task(f"GPT on text, {attention} attention", GPT2LMHeadModel(config), _predict, batches)


def _predict(model: nn.Module, batch: Batch) -> torch.Tensor:
    inputs, following = batch
    logits = model(inputs, use_cache=False).logits
    return functional.cross_entropy(logits.float().flatten(0, 1), following.flatten())


def train(task: Task, optimize: Optimize, steps: int, device: str, cast: AbstractContextManager[object]) -> Run:
    """Train a copy of the task's model. Dropout uses the device's random state."""
    model = copy.deepcopy(task.model)
    optimizer = optimize(model.parameters())  # built before the move, which must keep it valid, as on CUDA
    model.to(device).train()
    torch.manual_seed(4)
    start = time.perf_counter()
    losses = []
    for step in range(steps):
        batch = tuple(part.to(device) for part in task.batch(step))
        optimizer.zero_grad()
        with cast:
            loss = task.loss(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().float())
    curve = torch.stack(losses).cpu()
    seconds = time.perf_counter() - start
    return Run(curve, {name: p.detach().cpu() for name, p in model.state_dict().items()}, seconds)


def compare_runs(task: Task, optimizer: str, steps: int, bf16: bool = False) -> Comparison:
    """Train locally and remotely, and return the comparison. `bf16`: True to train under bfloat16 autocast."""
    here, remote = (
        train(task, OPTIMIZERS[optimizer], steps, device, _cast(device.partition(":")[0], bf16))
        for device in ("cpu", REMOTE)
    )
    differences = (remote.losses - here.losses).abs()
    apart = differences.nonzero()
    return Comparison(
        task=task.name + (", autocast" if bf16 else ""),
        optimizer=optimizer,
        steps=steps,
        tolerance=REDUCED_TOLERANCE if bf16 else TOLERANCE,
        first_loss=here.losses[0].item(),
        last_loss=here.losses[-1].item(),
        largest=differences.nan_to_num(nan=math.inf).max().item(),
        last=max(_largest(remote.parameters[name], p) for name, p in here.parameters.items()),
        apart=int(apart[0]) if len(apart) else None,
        bitwise=all(same_bits(remote.parameters[name], p) for name, p in here.parameters.items()) and not len(apart),
        here=here.seconds,
        remote=remote.seconds,
    )


def _cast(device_type: str, bf16: bool) -> AbstractContextManager[object]:
    return torch.autocast(device_type, dtype=torch.bfloat16) if bf16 else contextlib.nullcontext()


def _largest(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return (actual.double() - expected.double()).abs().max().item()
