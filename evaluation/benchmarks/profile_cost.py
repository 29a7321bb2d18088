"""Cost of `djinn.profile()`: decode and training steps with and without it, in short alternating turns.

    python -m evaluation.benchmarks.profile_cost [--seconds 28] [--case decode,wide,train] [--parts]

Uses a local executor. `decode`: tokens of a toy Llama. `wide`: tokens of a model of GPT-2 small's width. `train`: steps
of a small network with AdamW. For each: milliseconds per step, the ratio with a profile, the ratio of processor time of
client and executor, and both with `ops=True`, with 95% intervals. The bar is 1.05. Takes `--seconds` per case, and half
of it for `ops=True`. `--parts` measures the parts of a profile separately: timed ops, recorded modules, executor times,
recorded submissions and waits. The last line is a JSON object. `off_ns`: nanoseconds of the attribute tests of a
submission without a profile.
"""

from __future__ import annotations

import argparse
import json
import os
import time
import timeit
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

import djinn
from djinn_client.interception.native.library import ops
from djinn_client.interception.tap import Tap, taps
from djinn_client.runtime import client
from djinn_core.wire.timing_messages import TimingsReply, TimingsRequest
from djinn_profiler.timeline.recording import Recording
from evaluation.benchmarks.paired import ratio_of, take_turns

REMOTE = "remote_accelerator:0"


def decoding(tokens: int) -> Callable[[], object]:
    """Return a decoder of a toy Llama."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 6, "num_attention_heads": 8}
    return _generation(LlamaForCausalLM(LlamaConfig(vocab_size=2000, **sizes)), tokens)


def wide_decoding(tokens: int) -> Callable[[], object]:
    """Return a decoder of a model as wide and deep as GPT-2 small."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return _generation(GPT2LMHeadModel(GPT2Config(vocab_size=2000, bos_token_id=0, eos_token_id=1)), tokens)


def _generation(model: torch.nn.Module, tokens: int) -> Callable[[], object]:
    model = model.eval().to(REMOTE)
    ids = torch.randint(0, 2000, (1, 16), device=REMOTE)
    given = {"attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 0, "eos_token_id": None}

    @torch.inference_mode()
    def run() -> object:
        return model.generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, **given).tolist()

    return run


def training(steps: int) -> Callable[[], object]:
    """Return steps of a small network, each with a wait."""
    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(6)]).to(REMOTE)
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(32, 64, device=REMOTE)

    def run() -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            loss.item()

    return run


class ModuleTimes(Tap):
    """Tap that records entries and exits of modules."""

    def __init__(self) -> None:
        self.kept: list[object] = []

    def module(self, entered: object) -> None:
        """As `Tap.module`."""
        self.kept.extend((time.perf_counter(), entered))


@contextmanager
def timed_ops() -> Iterator[None]:
    """Time each op in the block."""
    ops.time_ops(True)
    try:
        yield
    finally:
        ops.time_ops(False)


def noted_modules() -> AbstractContextManager[None]:
    """Record entries and exits of modules in the block."""
    return taps.subscribed(ModuleTimes())


@contextmanager
def told_times() -> Iterator[None]:
    """Have the executor report times in the block."""
    session = client.context.session
    assert session is not None
    (executor,) = session.executors.here
    executor.replies.ask(TimingsRequest(), TimingsReply)
    try:
        yield
    finally:
        executor.replies.ask(TimingsRequest(on=False), TimingsReply)


def kept_submissions() -> AbstractContextManager[None]:
    """Record submissions and waits in the block."""
    return taps.subscribed(Recording(ops=False))


PARTS = (timed_ops, noted_modules, told_times, kept_submissions, djinn.profile)
CASES = {"decode": (decoding, 20), "wide": (wide_decoding, 10), "train": (training, 30)}


def main() -> None:
    """Print a table, and the figures as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=28)
    parser.add_argument("--case", default=",".join(CASES))
    parser.add_argument("--parts", action="store_true")
    options = parser.parse_args()
    djinn.configure(threads=1)
    torch.set_num_threads(1)
    figures: dict[str, object] = {"load_average": os.getloadavg()[0]}
    print(f"{'':8}{'ms a step':>10} {'profile':>26} {'processor time':>26} {'ops=True':>26} {'pairs':>6}")
    for name in options.case.split(","):
        make, count = CASES[name]
        run = make(count)
        for _ in range(4):
            run()
        processes = [os.getpid(), client.executor_process()]
        if options.parts:
            for part in PARTS:
                pairs = take_turns(run, nullcontext, part, processes, options.seconds)
                found = ratio_of(pairs.wall), ratio_of(pairs.processors)
                print(f"{name:8}{part.__name__:18}{found[0]!s:>26} {found[1]!s:>26} {len(pairs.wall):6}", flush=True)
                figures[f"{name}_{part.__name__}"] = found[0].middle, found[0].low, found[0].high
            continue
        pairs = take_turns(run, nullcontext, djinn.profile, processes, options.seconds)
        ops = take_turns(run, nullcontext, lambda: djinn.profile(ops=True), processes, options.seconds / 2)
        ratios = ratio_of(pairs.wall), ratio_of(pairs.processors), ratio_of(ops.wall)
        print(
            f"{name:8}{pairs.milliseconds(count):10.2f} {ratios[0]!s:>26} {ratios[1]!s:>26} {ratios[2]!s:>26} {len(pairs.wall):6}",
            flush=True,
        )
        figures[f"{name}_ms"] = pairs.milliseconds(count)
        for key, ratio in zip(("", "processor_", "ops_"), ratios, strict=True):
            figures[f"{name}_{key}ratio"] = ratio.middle, ratio.low, ratio.high
    # Without a profile, a submission looks for taps in four places.
    looked = "from djinn_client.interception.tap import taps"
    figures["off_ns"] = 4 * timeit.timeit("taps.sent", looked, number=10**6) * 1e3
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
