"""Cost of analysis: a new graph, a graph a hundred times as large, and a cached program.

A part of `run_semantics.py`. Times are this thread's processor time, because analysis does not wait.
"""

from __future__ import annotations

import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import attrs
import torch
from torch.nn import functional

import djinn
from djinn_client.runtime import client
from djinn_client.runtime.planning import plan_maker
from djinn_client.runtime.planning.planner import Planner, Planning, Recent
from djinn_client.runtime.stats import Stats
from djinn_core.ir.program import Program

REMOTE = "remote_accelerator:0"
SMALL, LARGE = 1_000, 100_000
_WIDTH, _HEADS, _LENGTH = 32, 4, 8
_TOKENS = 96


@attrs.frozen
class Layer:
    """The weights of one decoder layer, and its computation."""

    weights: tuple[torch.Tensor, ...]

    @classmethod
    def make(cls) -> Layer:
        shapes = (
            (_WIDTH,),
            (3 * _WIDTH, _WIDTH),
            (_WIDTH, _WIDTH),
            (_WIDTH,),
            (2 * _WIDTH, _WIDTH),
            (_WIDTH, 2 * _WIDTH),
        )
        return cls(tuple(torch.empty(shape, device=REMOTE) for shape in shapes))

    def __call__(self, state: torch.Tensor) -> torch.Tensor:
        first, qkv, out, second, up, down = self.weights
        normed = functional.layer_norm(state, (_WIDTH,), first)
        parts = functional.linear(normed, qkv).view(1, _LENGTH, 3, _HEADS, -1).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = (
            functional.scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2).reshape(1, _LENGTH, _WIDTH)
        )
        state = state + functional.linear(mixed, out)
        hidden = functional.gelu(functional.linear(functional.layer_norm(state, (_WIDTH,), second), up))
        return state + functional.linear(hidden, down)


@torch.no_grad()
def programs(count: int, times: int = 1) -> Iterator[Program]:
    """Yield a decoder of about `count` instructions with separate weights per layer, recorded `times` times."""
    one = _recorded([Layer.make()])
    layers = [Layer.make() for _ in range(max(1, count // (len(one) - _ENDS)))]
    djinn.synchronize()
    for _ in range(times):
        yield _recorded(layers)


_ENDS = 3  # instructions outside of layers


def _recorded(layers: list[Layer]) -> Program:
    tokens, table = torch.zeros(1, _LENGTH, dtype=torch.long, device=REMOTE), torch.empty(500, _WIDTH, device=REMOTE)
    with djinn.capture() as captured:
        state = functional.embedding(tokens, table)
        for layer in layers:
            state = layer(state)
        logits = functional.linear(state, table)
    del logits
    return captured.program


def seconds(run: Callable[[], object]) -> float:
    """Return the processor time of a call in this thread, without garbage collection."""
    gc.collect()
    gc.disable()
    try:
        start = time.thread_time()
        run()
        return time.thread_time() - start
    finally:
        gc.enable()


def analysis(count: int, times: int) -> tuple[float, int]:
    """Return the median seconds of analysing a new graph of about `count` nodes, and its number of nodes."""
    (program,) = programs(count)
    djinn.plan(program, until="annotate")  # loads plugins and fills caches of forms
    took = statistics.median(seconds(lambda: djinn.plan(program, until="annotate")) for _ in range(times))
    return took, len(program)


def hit_seconds(times: int = 24) -> float:
    """Return the median seconds to find the cached plan of a program of about 1,000 instructions.

    Includes all work of a session to find a plan: call look-ups with hashes, comparison of structure and numbers, and the values
    in order. As in a session, each program is newly recorded.
    """
    stats = Stats()

    def begin(recent: Recent) -> Planning:
        maker = plan_maker.PlanMaker(client.context, recent)
        return Planning(maker.plan, maker.analyse)

    planner = Planner(stats, begin)
    took: list[float] = []
    for program in programs(SMALL, times):
        start = time.thread_time()
        planner.prepare(program)
        took.append((time.thread_time() - start) * SMALL / len(program))
    assert (stats.plans_made, stats.plans_reused) == (1, times - 1)
    return statistics.median(took[2:])


def generation_cache_hit_rate() -> float:
    """Return the share of programs of a `generate()` loop with a known template, including the first ones."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(n_layer=2, n_embd=32, n_head=4, vocab_size=500, n_positions=128)
    model = GPT2LMHeadModel(config).eval().to(REMOTE)
    given = torch.arange(3, 11)[None].to(REMOTE)
    djinn.synchronize()
    before = djinn.stats()
    model.generate(given, max_new_tokens=_TOKENS, min_new_tokens=_TOKENS, do_sample=False, pad_token_id=0)
    after = djinn.stats()
    sent, reused = (after[name] - before[name] for name in ("templates_sent", "templates_reused"))
    return reused / (sent + reused)


def predictions() -> dict[str, float | None]:
    """Return the accuracy of cost models on programs that calibration does not use, by `djinn validate`; None on failure."""
    command = [sys.executable, "-m", "djinn_core.cli", "validate", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    if done.returncode:
        print(f"djinn validate failed: {done.stderr.strip()[-500:]}", file=sys.stderr)
        return {"time_median_error": None, "time_r2_log": None}
    found = json.loads(done.stdout.splitlines()[-1])
    return {"time_median_error": found["median_error"], "time_r2_log": found["r2_log"]}


def timings() -> dict[str, float]:
    """Return the cost of analysis, by the keys of `run_semantics.py`."""
    small, nodes = analysis(SMALL, 9)
    large, many = analysis(LARGE, 3)
    return {
        "analysis_ms_1000": small * 1e3 * SMALL / nodes,
        "analysis_ratio_100k": (large / many) / (small / nodes) * LARGE / SMALL,
        "hit_us": hit_seconds() * 1e6,
        "hit_rate": generation_cache_hit_rate(),
    }


__all__ = ["predictions", "timings"]
