"""Decide by trial runs whether batched instructions are faster, and whether their results are equal.

During a trial, each session gets the results that were computed for it separately.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, Literal

import attrs
import torch

from djinn_core import torch_private
from djinn_core.logs import get_logger
from djinn_server.running.device_time import DeviceTimer
from djinn_server.running.result_layout import layout_difference
from djinn_strategies.batching.joined_runs import RecordedChain
from djinn_strategies.batching.products import Product
from djinn_strategies.batching.rows import RowStep, find_chains
from djinn_strategies.batching.weights import PackedWeights, WeightKey, key_of

CHECKS: Final = 3  # number of measured batches in a trial
GAIN: Final = 0.9  # largest accepted ratio of batched to separate time
PAUSE: Final = 64  # number of runs without batching, after batches that joined no product

_log = get_logger("djinn.server")

BatchMethod = Literal["packed", "joined"]
METHODS: Final[tuple[BatchMethod, ...]] = ("packed", "joined")


@attrs.frozen
class Operands:
    """Operands of one product for all sessions.

    Attributes:
        rows: rows of all sessions, concatenated.
        sizes: number of rows of each session.
        weight: the weight, which all sessions share.
        bias: the bias, which all sessions share, or None.
    """

    rows: torch.Tensor
    sizes: Sequence[int]
    weight: torch.Tensor
    bias: torch.Tensor | None


@attrs.define
class Samples:
    """Measurements of one instruction.

    Attributes:
        separate_seconds: least seconds to compute the instruction separately for all sessions.
        methods: least seconds by batching method; infinite if its results differed.
        difference: how the results of a batching method differed; empty if they were equal.
        rejected_methods: batching methods that returned different results or raised.
        runs: number of measurements.
        weight: key of the product's weight; None for a row-wise instruction.
    """

    separate_seconds: float = math.inf
    methods: dict[BatchMethod, float] = attrs.field(factory=lambda: dict.fromkeys(METHODS, math.inf))
    difference: str = ""
    rejected_methods: set[BatchMethod] = attrs.field(factory=set)
    runs: int = 0
    weight: WeightKey | None = None

    def seconds(self, method: BatchMethod) -> float:
        """Return the least seconds with a batching method, or `separate_seconds` if the method is unusable."""
        return self.methods[method] if math.isfinite(self.methods[method]) else self.separate_seconds


@attrs.define(eq=False)
class BatchTrial:
    """Measure whether batching saves time for a template with the weights of one model.

    Attributes:
        products: products of the template.
        rows: row-wise instructions of the template.
        packed: copies of weights on the device.
        timer: clock of the device.
        methods: batching method of each product, or None if it is not batched; empty if no product is batched.
        sessions: number of sessions when the trial started. A batch of at most half that size is not measured.
        is_decided: True once the trial is over.
        is_measuring: True during a batch that is measured.
        slow_sessions: number of sessions up to which batching was slower; 0 if batching is faster or not decided.
        reason: why batching was rejected; empty if it was not.
        pause: number of next runs without batching. It is set after batches in which no product was batched.
        without_products: number of consecutive batches in which no product was batched.
        samples: measurements of each product.
        row_samples: measurements of row-wise instructions, by number of the instruction.
        recorded_chains: recorded chains, by first instruction and number of runs.
    """

    products: Sequence[Product]
    rows: Sequence[RowStep]
    packed: PackedWeights
    timer: DeviceTimer
    methods: Sequence[BatchMethod | None] = ()
    sessions: int = 1
    is_decided: bool = False
    is_measuring: bool = False
    slow_sessions: int = 0
    reason: str = ""
    pause: int = 0
    without_products: int = 0
    samples: list[Samples] = attrs.field(init=False)
    row_samples: dict[int, Samples] = attrs.field(factory=dict)
    _chains: Sequence[range] = ()
    _all_chains: Sequence[range] = attrs.field(init=False)
    recorded_chains: dict[tuple[int, int], RecordedChain] = attrs.field(factory=dict)

    def __attrs_post_init__(self) -> None:
        self.samples = [Samples() for _ in self.products]
        self._all_chains = find_chains(self.products, self.rows, None)

    def compute(self, number: int, operands: Operands) -> torch.Tensor | None:
        """Return the result of product `number` for all sessions, or None if the product is not batched."""
        method = self.methods[number] if self.methods else None
        return None if method is None else self._multiply(self.products[number], method, operands)

    def try_product(
        self, number: int, operands: Operands, compute_one: Callable[[int], torch.Tensor], unwritten: bool
    ) -> Sequence[torch.Tensor]:
        """Measure product `number` with each batching method. Return the separately computed result of each session.

        Args:
            number: index of the product.
            operands: operands for all sessions.
            compute_one: computes the result of one session, by its index.
            unwritten: True if no program writes the weight, so that a packed copy stays valid.
        """
        product, samples = self.products[number], self.samples[number]
        if unwritten:
            self._pack(product, operands)
        results = self._measure_separately(samples, len(operands.sizes), compute_one)
        samples.weight = key_of(operands.weight)
        for method in METHODS:
            self._measure_method(
                method, samples, results, operands.sizes, partial(self._multiply, product, method, operands)
            )
        return results

    def try_row(
        self,
        step: int,
        sizes: Sequence[int],
        compute_one: Callable[[int], torch.Tensor],
        compute_joined: Callable[[], torch.Tensor],
    ) -> Sequence[torch.Tensor]:
        """Measure a row-wise instruction with and without batching.

        Return the separately computed result of each session.

        Args:
            step: number of the instruction.
            sizes: number of rows of each session.
            compute_one: computes the result of one session, by its index.
            compute_joined: computes the result for all sessions at once.
        """
        samples = self.row_samples.setdefault(step, Samples(methods={"joined": math.inf}))
        results = self._measure_separately(samples, len(sizes), compute_one)
        self._measure_method("joined", samples, results, sizes, compute_joined)
        return results

    def begin(self, sessions: int) -> None:
        """Start a batch of `sessions` sessions.

        The trial restarts if there are at least twice as many sessions as when it started, because another method may
        be faster.
        """
        if sessions >= 2 * self.sessions:
            self.sessions, self.is_decided = sessions, False
            self._restart()
        self.is_measuring = not self.is_decided and 2 * sessions > self.sessions

    @property
    def chains(self) -> Sequence[range]:
        """Return the chains to batch. During a trial, return all chains that could be batched."""
        return self._all_chains if self.is_measuring else self._chains

    def remember(self, start: int, chain: RecordedChain | None) -> None:
        """Cache the chain from instruction `start` for its number of runs, unless it is None or a batch is measured."""
        if not self.is_measuring and chain is not None:
            self.recorded_chains[start, len(chain.sizes)] = chain

    def decide(self, computed: int) -> bool:
        """End the trial and choose the batching method, if every product has enough measurements.

        Return True if the trial ended.

        `computed`: number of products that the last batch computed for all sessions at once.
        """
        self.without_products = 0 if computed else self.without_products + 1
        if self.without_products >= CHECKS:
            self.without_products, self.pause = 0, PAUSE
        measured = [entry for entry in self.samples if entry.runs]
        if not self.is_measuring or not measured or min(entry.runs for entry in measured) < CHECKS:
            return False
        # One method for all products: the timing of a single product is too noisy.
        seconds = {method: sum(entry.seconds(method) for entry in measured) for method in METHODS}
        method = min(METHODS, key=lambda entry: seconds[entry])
        ratio = seconds[method] / max(sum(entry.separate_seconds for entry in measured), 1e-9)
        if ratio > GAIN:
            differing = [entry.difference for entry in measured if entry.difference]
            self.reason = differing[0] if differing else f"a batch takes {ratio:.2f} of the time"
            self.slow_sessions, self.methods, self._chains = self.sessions, (), ()
        else:
            self.methods = [method if math.isfinite(entry.methods[method]) else None for entry in self.samples]
            self._chains = find_chains(self.products, self.rows, self._decide_rows())
            self.slow_sessions, self.reason = 0, ""
        for sample, chosen_method in zip(self.samples, self.methods or [None] * len(self.samples), strict=True):
            if chosen_method != "packed" and sample.weight is not None:
                self.packed.drop(sample.weight, self)
        self.is_decided, self.recorded_chains = True, {}
        self._restart()
        return True

    def _restart(self) -> None:
        self.samples, self.row_samples = [Samples() for _ in self.products], {}

    def _decide_rows(self) -> frozenset[int]:
        """Return the row-wise instructions to batch: all with equal results, or none if batching is not faster."""
        measured = {
            step: samples for step, samples in self.row_samples.items() if math.isfinite(samples.methods["joined"])
        }
        joined_seconds = sum(samples.methods["joined"] for samples in measured.values())
        return frozenset(
            measured if joined_seconds <= GAIN * sum(samples.separate_seconds for samples in measured.values()) else ()
        )

    def _measure_separately(
        self, samples: Samples, sessions: int, compute_one: Callable[[int], torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        start = self.timer.mark()
        results = [compute_one(session) for session in range(sessions)]
        samples.separate_seconds = min(samples.separate_seconds, self._seconds_since(start))
        samples.runs += 1
        return results

    def _pack(self, product: Product, operands: Operands) -> None:
        try:
            self.packed.pack(operands.weight, product.transposed, len(operands.rows), self)
        except Exception as error:
            _log.debug("a weight cannot be packed", error=repr(error))

    def _measure_method(
        self,
        method: BatchMethod,
        samples: Samples,
        results: Sequence[torch.Tensor],
        sizes: Sequence[int],
        compute_joined: Callable[[], torch.Tensor | None],
    ) -> None:
        if method in samples.rejected_methods:
            return
        try:
            start = self.timer.mark()
            result_rows = compute_joined()
            seconds = self._seconds_since(start)
            if result_rows is None:
                return
            joined_results = split_rows(result_rows, sizes, [result.shape for result in results])
            difference = next(filter(None, map(_difference, results, joined_results)), "")
        except Exception as error:
            difference = f"it raised {type(error).__name__}: {error}"
        if difference:
            samples.difference = difference
            samples.rejected_methods.add(method)
        samples.methods[method] = math.inf if difference else min(samples.methods[method], seconds)

    def _multiply(self, product: Product, method: BatchMethod, operands: Operands) -> torch.Tensor | None:
        weight, bias, rows = operands.weight, operands.bias, operands.rows
        packed = self.packed.get(weight) if method == "packed" else None
        if method == "packed" and packed is None:
            return None
        if packed is not None:
            return torch_private.packed_product(rows, packed, bias)
        if product.transposed:
            return torch.nn.functional.linear(rows, weight, bias)
        return torch.matmul(rows, weight) if bias is None else torch.addmm(bias, rows, weight)

    def _seconds_since(self, start: Any) -> float:
        end = self.timer.mark()
        self.timer.wait(end)
        return self.timer.seconds(start, end)


def split_rows(rows: torch.Tensor, sizes: Sequence[int], shapes: Sequence[torch.Size]) -> Sequence[torch.Tensor]:
    """Return the rows of each session as a separate copy, so that sessions cannot write into each other's rows."""
    parts = torch.ops.aten.split_with_sizes_copy(rows, sizes)
    return [part if part.shape == shape else part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def _difference(expected: torch.Tensor, actual: torch.Tensor) -> str:
    """Return how a batched result differs from the separate result, or an empty text if only rounding differs."""
    if layout := layout_difference(expected, actual):
        return layout
    largest = max(1.0, float(expected.abs().max())) if expected.numel() else 1.0
    relative, absolute = torch_private.default_tolerances(expected.dtype)
    scaled = absolute * (largest if math.isfinite(largest) else 1.0)
    close = torch.allclose(actual, expected, rtol=relative, atol=scaled, equal_nan=True)
    return "" if close else "results differ by more than rounding"
