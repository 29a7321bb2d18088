"""Recording cost: the client's time for an op that it has seen before, against the least that PyTorch lets it cost.

    python -m evaluation.benchmarks.bench_capture [--json] [--quick] [--case decode_step]

`decode_step` records a step of GPT-2-small with a cache again and again, call by call as the model makes them; the
reference is the same calls on a tensor whose `__torch_dispatch__` builds the wrappers that it returns and does nothing
else. (Ops that are kept whole do not come to `__torch_dispatch__`; the reference leaves them out, and both are divided by
their ops.) Nothing is sent: what was recorded is thrown away between rounds. Processor time counts, and the best round,
for other processes only add to it. `instruction_bytes` is counted, not timed.
"""

from __future__ import annotations

import gc
import time
import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import attrs
import torch
from torch.overrides import TorchFunctionMode, resolve_name

import djinn
from djinn_client import torch_dispatch
from djinn_client.interception.native.library import ops
from djinn_client.interception.recording.recorder import SyncRequest, current
from evaluation.benchmarks.measuring import Case, Effort, Outcome, main

REMOTE = torch.device("remote_accelerator:0")
ROUNDS = 40
CALLS = 1000
Spec = tuple[tuple[int, ...], tuple[int, ...], int, torch.dtype]


class Floor(torch.Tensor):
    """Does nothing but return wrappers: those of `specs`, one after the other."""

    specs: Iterator[tuple[Spec, ...]]

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        made = [torch_dispatch.make_wrapper(cls, *spec, REMOTE) for spec in next(cls.specs)]
        return made[0] if len(made) == 1 else made

    __torch_function__ = torch_dispatch.disabled_torch_function


@attrs.frozen
class Issued:
    """A call of a model, and what came out of it. `ops` instructions were recorded for it."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    named: dict[str, Any]
    result: Any
    ops: int


class Listening(TorchFunctionMode):
    """Notes the calls of PyTorch's functions for which instructions are recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.issued: list[Issued] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        before = len(current().entries)
        result = func(*args, **(kwargs or {}))
        ops = len(current().entries) - before
        if ops:
            self.issued.append(Issued(func, args, kwargs or {}, result, ops))
        return result


def nothing_is_sent() -> None:
    """Forget what was recorded, and send nothing however much is recorded next."""
    current().take(SyncRequest())
    ops.drop_freed()
    current().limit = 10**9


def decode_step(effort: Effort) -> list[Issued]:
    """The calls of a step of GPT-2-small; their metadata is all that matters, so its weights are left out."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_embd=48, n_head=12, vocab_size=1000) if effort.small else GPT2Config()
    with torch.device(REMOTE):
        model = GPT2LMHeadModel(config).eval()
    nothing_is_sent()
    token = torch.zeros(1, 1, dtype=torch.int64, device=REMOTE)
    out = model(torch.zeros(1, 16, dtype=torch.int64, device=REMOTE), use_cache=True)
    nothing_is_sent()
    with Listening() as heard:
        out = model(token, past_key_values=out.past_key_values, use_cache=True)
        out.logits[:, -1:].argmax(-1)
    nothing_is_sent()
    # A factory has no operand by which the reference could be called.
    return [call for call in heard.issued if any(isinstance(a, torch.Tensor) for a in flat(call.arguments))]


def flat(values: Any) -> Iterator[Any]:
    """Elements of nested tuples and lists."""
    for value in values:
        if isinstance(value, tuple | list):
            yield from flat(value)
        else:
            yield value


def replaced(value: Any) -> Any:
    """The same with tensors that do nothing."""
    if isinstance(value, torch.Tensor):
        return torch_dispatch.make_wrapper(Floor, *spec_of(value), REMOTE)
    return (
        type(value)(map(replaced, value)) if isinstance(value, tuple | list) and type(value) in {tuple, list} else value
    )


def spec_of(tensor: torch.Tensor) -> Spec:
    return tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), tensor.dtype


def least(calls: list[Issued]) -> tuple[list[Issued], list[tuple[Spec, ...]]]:
    """The calls that come to `__torch_dispatch__` as they are, on tensors that do nothing, and what they return."""
    whole = {"linear", "matmul", "layer_norm", "scaled_dot_product_attention"}
    kept = [call for call in calls if call.ops == 1 and (resolve_name(call.function) or "").split(".")[-1] not in whole]
    made = [tuple(spec_of(tensor) for tensor in flat((call.result,))) for call in kept]
    return [attrs.evolve(call, arguments=replaced(call.arguments), named={}) for call in kept], made


def issue(calls: list[Issued]) -> None:
    """Make the calls again."""
    for call in calls:
        call.function(*call.arguments, **call.named)


def best(run: Callable[[], object], rounds: int, before: Callable[[], object]) -> float:
    """Seconds of processor time of the best round."""
    found = []
    for _ in range(rounds):
        before()
        start = time.thread_time()
        run()
        found.append(time.thread_time() - start)
    return min(found)


@torch.no_grad()
def average(effort: Effort) -> Outcome:
    """The mean over the ops of a decode step."""
    calls = decode_step(effort)
    bare, specs = least(calls)

    def from_the_start() -> None:
        Floor.specs = iter(specs)

    rounds = effort.times(ROUNDS)
    gc.collect()
    gc.disable()
    try:
        floor = alternating(rounds, lambda: issue(bare), from_the_start, lambda: issue(calls), nothing_is_sent)
    finally:
        gc.enable()
    bare_seconds, seconds = floor
    ops = sum(call.ops for call in calls)
    floor_us, cost_us = bare_seconds / len(bare) * 1e6, seconds / ops * 1e6
    return Outcome(cost_us / floor_us, {"floor us": floor_us, "ours us": cost_us, "ops": ops})


def alternating(rounds: int, first: Any, before_first: Any, second: Any, before_second: Any) -> tuple[float, float]:
    """The best of each, in turns."""
    pairs = [(best(first, 2, before_first), best(second, 2, before_second)) for _ in range(rounds)]
    return min(a for a, _ in pairs), min(b for _, b in pairs)


OPS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "add": lambda x: x + 1.0,
    "view": lambda x: x.view(2, 8),
    "mm": lambda x: torch.mm(x, x),
    "in_place": lambda x: x.add_(1.0),
}


@torch.no_grad()
def single(name: str, effort: Effort) -> Outcome:
    """One op, over and over."""
    spec = ((4, 4), (4, 1), 0, torch.float32)
    remote, bare = torch.empty(4, 4, device=REMOTE), torch_dispatch.make_wrapper(Floor, *spec, REMOTE)

    def endless() -> None:
        Floor.specs = iter([(spec,)] * CALLS)

    def often(op: Callable[[torch.Tensor], torch.Tensor], tensor: torch.Tensor) -> None:
        for _ in range(CALLS):
            op(tensor)

    nothing_is_sent()
    lowest, cost = alternating(
        effort.times(ROUNDS),
        partial(often, OPS["add"], bare),
        endless,
        partial(often, OPS[name], remote),
        nothing_is_sent,
    )
    return Outcome(cost / lowest, {"floor us": lowest / CALLS * 1e6, "ours us": cost / CALLS * 1e6})


@torch.no_grad()
def instruction_bytes(effort: Effort) -> Outcome:
    """Memory of a recorded instruction, the mean over a decode step.

    `with what died` has in it what is left of tensors without a reference, until the program is sent and they are freed.
    """
    calls = decode_step(effort)
    ops = sum(call.ops for call in calls)
    nothing_is_sent()
    issue(calls)
    recorded, whole = min(allocated(calls) for _ in range(3))  # lists and caches grow now and then
    return Outcome(recorded / ops, {"with what died": whole / ops, "ops": ops})


_FREED_BYTES = 64  # of a freed value in the queue in C++


def bytes_in_cpp() -> tuple[int, int]:
    """Bytes of this thread's program in C++, which `tracemalloc` does not see: without freed values, and with them."""
    recorder: Any = current()
    recorded = len(ops.look(recorder.program, 0))
    return recorded, recorded + _FREED_BYTES * len(ops.look_freed())


def allocated(calls: list[Issued]) -> tuple[int, int]:
    """Bytes that the calls leave behind: without what is left of tensors that died, and with it."""
    nothing_is_sent()
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        issue(calls)
        gc.collect()  # it also empties Python's lists of tuples to use again, which no object holds
        whole, _ = tracemalloc.get_traced_memory()
        in_cpp, whole_in_cpp = bytes_in_cpp()
        ops.drop_freed()
        gc.collect()
        recorded, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        nothing_is_sent()
    return recorded - before + in_cpp, whole - before + whole_in_cpp


CASES = (
    Case("capture_decode_step", 2.5, average),
    *(Case(f"capture_{name}", None, partial(single, name)) for name in OPS),
    Case("instruction_bytes", 300, instruction_bytes, "B"),
)

if __name__ == "__main__":
    djinn.configure(checkpoint_instructions=10**9, threads=1)
    main("Recording an op that is known", CASES)
