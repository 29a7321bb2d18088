"""Recording cost: the client's time for a cached op, divided by the minimum that PyTorch allows.

    python -m evaluation.benchmarks.bench_capture [--json] [--quick] [--case decode_step]

`decode_step` repeatedly records a decode step of GPT-2-small, call by call. The reference repeats these calls on a
tensor whose `__torch_dispatch__` only builds the returned wrappers. Ops that are kept whole do not reach
`__torch_dispatch__`; the reference leaves them out, and both times are divided by the number of ops. Nothing is sent:
recorded ops are dropped between rounds. The value is the best round's processor time, because other load only adds to
it. `instruction_bytes` is counted, not timed.
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
    """A tensor whose ops only return wrappers with the metadata in `specs`, in order."""

    specs: Iterator[tuple[Spec, ...]]

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        outputs = [torch_dispatch.make_wrapper(cls, *spec, REMOTE) for spec in next(cls.specs)]
        return outputs[0] if len(outputs) == 1 else outputs

    __torch_function__ = torch_dispatch.disabled_torch_function


@attrs.frozen
class Issued:
    """A call of a PyTorch function with its arguments and result. `ops`: number of recorded instructions."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    named: dict[str, Any]
    result: Any
    ops: int


class Listening(TorchFunctionMode):
    """Collects the calls of PyTorch functions for which Djinn recorded instructions."""

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
    """Drop recorded ops, and disable sending of programs."""
    current().take(SyncRequest())
    ops.drop_freed()
    current().limit = 10**9


def decode_step(effort: Effort) -> list[Issued]:
    """Return the calls of a decode step of GPT-2-small. Weights are left out, because only metadata matter."""
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
    # A factory has no operand through which the reference could be called.
    return [call for call in heard.issued if any(isinstance(a, torch.Tensor) for a in flat(call.arguments))]


def flat(values: Any) -> Iterator[Any]:
    """Yield the elements of nested tuples and lists."""
    for value in values:
        if isinstance(value, tuple | list):
            yield from flat(value)
        else:
            yield value


def with_floor_tensors(value: Any) -> Any:
    """Return an argument with its tensors replaced by `Floor` tensors."""
    if isinstance(value, torch.Tensor):
        return torch_dispatch.make_wrapper(Floor, *spec_of(value), REMOTE)
    return (
        type(value)(map(with_floor_tensors, value))
        if isinstance(value, tuple | list) and type(value) in {tuple, list}
        else value
    )


def spec_of(tensor: torch.Tensor) -> Spec:
    return tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), tensor.dtype


def least(calls: list[Issued]) -> tuple[list[Issued], list[tuple[Spec, ...]]]:
    """Return the calls that reach `__torch_dispatch__` as one op, with `Floor` tensors as arguments.

    Also return the metadata of the calls' results, which `Floor.specs` needs.
    """
    whole = {"linear", "matmul", "layer_norm", "scaled_dot_product_attention"}
    reaching = [
        call for call in calls if call.ops == 1 and (resolve_name(call.function) or "").split(".")[-1] not in whole
    ]
    outputs = [tuple(spec_of(tensor) for tensor in flat((call.result,))) for call in reaching]
    return [attrs.evolve(call, arguments=with_floor_tensors(call.arguments), named={}) for call in reaching], outputs


def issue(calls: list[Issued]) -> None:
    """Repeat the calls."""
    for call in calls:
        call.function(*call.arguments, **call.named)


def best(run: Callable[[], object], rounds: int, before: Callable[[], object]) -> float:
    """Return the processor time of the best round in seconds."""
    results = []
    for _ in range(rounds):
        before()
        start = time.thread_time()
        run()
        results.append(time.thread_time() - start)
    return min(results)


@torch.no_grad()
def average(effort: Effort) -> Outcome:
    """Return the mean recording time of a decode step's ops, divided by the mean time of ops on `Floor` tensors."""
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
    """Return the best processor times of `first` and `second`, which alternate for `rounds` rounds."""
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
    """Return the client's time to record the op `name`, divided by the time of an addition of `Floor` tensors."""
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
    """Return the memory of a recorded instruction: the mean over a decode step.

    `with what died` includes the records of dead tensors, which are freed when the program is sent.
    """
    calls = decode_step(effort)
    ops = sum(call.ops for call in calls)
    nothing_is_sent()
    issue(calls)
    nbytes, whole = min(allocated(calls) for _ in range(3))  # the minimum, because lists and caches grow now and then
    return Outcome(nbytes / ops, {"with what died": whole / ops, "ops": ops})


_FREED_BYTES = 64  # bytes of a freed value in the C++ queue


def bytes_in_cpp() -> tuple[int, int]:
    """Return the bytes of this thread's program in C++, which `tracemalloc` does not see: without and with freed values."""
    recorder: Any = current()
    instruction_count = len(ops.look(recorder.program, 0))
    return instruction_count, instruction_count + _FREED_BYTES * len(ops.look_freed())


def allocated(calls: list[Issued]) -> tuple[int, int]:
    """Return the bytes that recording the calls allocates, without and with the records of dead tensors."""
    nothing_is_sent()
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        issue(calls)
        gc.collect()  # also empties Python's free lists of tuples
        whole, _ = tracemalloc.get_traced_memory()
        in_cpp, whole_in_cpp = bytes_in_cpp()
        ops.drop_freed()
        gc.collect()
        current_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        nothing_is_sent()
    return current_bytes - before + in_cpp, whole - before + whole_in_cpp


CASES = (
    Case("capture_decode_step", 2.5, average),
    *(Case(f"capture_{name}", None, partial(single, name)) for name in OPS),
    Case("instruction_bytes", 300, instruction_bytes, "B"),
)

if __name__ == "__main__":
    djinn.configure(checkpoint_instructions=10**9, threads=1)
    main("Recording an op that is known", CASES)
