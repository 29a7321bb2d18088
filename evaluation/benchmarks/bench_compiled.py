"""Speed of server-side compilation: hot programs under `djinn serve --compile inductor`, against local eager PyTorch.

    python -m evaluation.benchmarks.bench_compiled [--json] [--quick] [--rounds 5] [--case elementwise,decode]

`compiled ms` is the same model under a local `torch.compile` in the same run. The unchanged remote model is called
until the server has finished compiling (`adopted s`), which is not timed. `again s` is the same for a second server
process, which finds the first one's results on disk. If fewer templates are adopted than were hot, `djinn serve` logs
why.
"""

from __future__ import annotations

import math
import tempfile
import time
from functools import partial
from unittest.mock import patch

import torch
from attrs import evolve
from torch import nn

from djinn_client.interception.device.memory import figures
from evaluation.benchmarks.bench_models import REMOTE, Start, decode, forward
from evaluation.benchmarks.measuring import CannotMeasureError, Case, Effort, Outcome, Run, compare, main, median_of
from evaluation.benchmarks.serving import connected

PATIENCE_SECONDS = 600.0
QUIET_RUNS = 40  # runs without new templates for the compiler


class RMSNorm(nn.Module):
    """RMSNorm, decomposed as in many models."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    one, other = x.chunk(2, -1)
    return x * cos + torch.cat((-other, one), -1) * sin


class Block(nn.Module):
    """Attention with rotary positions and a gated MLP, without fused ops."""

    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = RMSNorm(width), RMSNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        y = self.before(x)
        q, k, v = (
            linear(y).view(batch, length, self.heads, -1).transpose(1, 2)
            for linear in (self.query, self.key, self.value)
        )
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        visited = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(visited.transpose(1, 2).reshape(batch, length, width))
        y = self.between(x)
        gate = self.gate(y)
        return x + self.down(gate * torch.sigmoid(gate) * self.up(y))


class Llama(nn.Module):
    """A narrow Llama-like model, dominated by elementwise ops."""

    def __init__(self, width: int = 64, heads: int = 4, inner: int = 172, layers: int = 4) -> None:
        super().__init__()
        self.size = width // heads
        self.blocks = nn.ModuleList(Block(width, heads, inner) for _ in range(layers))
        self.norm = RMSNorm(width)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        rates = torch.exp(torch.arange(0, self.size, 2, device=x.device) * (-math.log(10000.0) / self.size))
        angles = torch.arange(x.shape[1], device=x.device)[:, None] * rates
        angles = torch.cat((angles, angles), -1)
        cos, sin = angles.cos(), angles.sin()
        for block in self.blocks:
            x = block(x, cos, sin)
        return (self.norm(x),)


def elementwise(batch: int) -> Start:
    """Return a forward pass over `batch` sequences of 128."""
    return forward(lambda: (Llama(), {"x": torch.randn(batch, 128, 64)}))


def under_compile(start: Start) -> Run | None:
    """Return the step of `start` under a local `torch.compile`, or None if `torch.compile` does not work here.

    Cases call `.eval()` on their model. This function patches `eval` to compile the model.
    """
    try:
        with patch.object(nn.Module, "eval", lambda module: torch.compile(module.train(False))):
            run = start("cpu")
        for _ in range(3):
            run()
    except Exception as error:
        print(f"local torch.compile does not work here: {error!r}")
        return None
    return run


def warm(run: Run) -> tuple[float, int]:
    """Call the step until the server has finished compiling. Return the seconds, and the number of hot templates."""
    start = last = time.monotonic()
    quiet = hot = 0
    while quiet < QUIET_RUNS:
        run()
        result = figures()
        if "compiling_templates" not in result:
            raise CannotMeasureError("the server has no compiler")
        hot = max(hot, result["compiling_templates"] + result["compiled_templates"])
        quiet = 0 if result["compiling_templates"] else quiet + 1
        last = last if quiet else time.monotonic()
        if time.monotonic() - start > PATIENCE_SECONDS:
            raise CannotMeasureError(f"the server has not finished compiling after {PATIENCE_SECONDS:g} s")
    return last - start, hot


def measure(start: Start, times: int, effort: Effort) -> Outcome:
    """Measure the compiling server against local eager. The figures include a local `torch.compile`."""
    here = start("cpu")
    for _ in range(3):
        here()
    before = median_of(here, effort.times(times))
    with tempfile.TemporaryDirectory() as folder:  # an empty compile cache, except for PyTorch's headers
        caches = {"XDG_CACHE_HOME": folder, "TORCHINDUCTOR_CACHE_DIR": folder}
        compiling = partial(connected, "--compile", "inductor", threads=effort.threads, environment=caches)
        with compiling():
            there = start(REMOTE)
            seconds, hot = (0.0, 0) if effort.small else warm(there)
            compiled_before = figures().get("compiled_templates", 0)
            compared = compare(here, there, effort, times, alone=before)
        again = 0.0
        if not effort.small:
            with compiling():
                again, _ = warm(start(REMOTE))
    alone = min(before, median_of(here, effort.times(times)))
    by_hand = None if effort.small else under_compile(start)
    more = {"compiled ms": median_of(by_hand, effort.times(times)) * 1e3} if by_hand else {}
    more |= {"adopted s": seconds, "again s": again, "hot templates": hot, "adopted templates": compiled_before}
    return evolve(compared, alone=alone).outcome(**more)


def case(name: str, bar: float | None, times: int, start: Start) -> Case:
    """Return the case `name` with the bar `bar`, which calls the step of `start` `times` times per round."""
    return Case(name, bar, partial(measure, start, times))


CASES = (
    case("elementwise", 0.70, 16, elementwise(16)),
    case("elementwise_small", None, 32, elementwise(4)),
    case("decode_compiled", 1.00, 24, decode()),
)

if __name__ == "__main__":
    main("Compiled on the server, over loopback TCP against local eager PyTorch", CASES)
