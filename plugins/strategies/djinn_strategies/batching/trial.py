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
from djinn_strategies.batching.joined_runs import KnownChain
from djinn_strategies.batching.products import Product
from djinn_strategies.batching.rows import RowStep, chains
from djinn_strategies.batching.weights import PackedWeights, WeightPlace, place_of

CHECKS: Final = 3  # batches of a trial
GAIN: Final = 0.9  # largest accepted ratio of batched to separate time
PAUSE: Final = 64  # runs

_log = get_logger("djinn.server")

Way = Literal["packed", "joined"]
WAYS: Final[tuple[Way, ...]] = ("packed", "joined")


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
        alone: least seconds to compute the instruction separately for each session.
        ways: least seconds by batching method. The value is infinite if the results differed.
        difference: how the results of a batching method differed.
        refused: batching methods with different results, or that raised.
        runs: number of measurements.
        weight: position of the product's weight in memory.
    """

    alone: float = math.inf
    ways: dict[Way, float] = attrs.field(factory=lambda: dict.fromkeys(WAYS, math.inf))
    difference: str = ""
    refused: set[Way] = attrs.field(factory=set)
    runs: int = 0
    weight: WeightPlace | None = None

    def seconds(self, way: Way) -> float:
        """Return the least seconds with a batching method.

        If the method cannot compute this product, return `alone`.
        """
        return self.ways[way] if math.isfinite(self.ways[way]) else self.alone


@attrs.define(eq=False)
class BatchTrial:
    """Measure for a template, with the weights of one model, whether batching saves time.

    Attributes:
        products: products of the template.
        rows: row-wise instructions of the template.
        packed: copies of weights on the device.
        timer: clock of the device.
        ways: batching method of each product. None means that the product is not batched. Empty without a decision.
        sessions: number of sessions when the trial started. A batch of at most half that size is not measured.
        decided: True once the trial is over.
        trying: True during a batch that is measured.
        refused: number of sessions up to which batching was slower. It is 0 if batching is faster or nothing is
            decided.
        reason: why batching was rejected.
        pause: number of coming runs without batching. Batches in which no product could be batched cause a pause.
        without_products: number of consecutive batches in which no product was batched.
        samples: measurements of each product.
        row_samples: measurements of row-wise instructions, by number of the instruction.
        known: recorded chains, by first instruction and number of runs.
    """

    products: Sequence[Product]
    rows: Sequence[RowStep]
    packed: PackedWeights
    timer: DeviceTimer
    ways: Sequence[Way | None] = ()
    sessions: int = 1
    decided: bool = False
    trying: bool = False
    refused: int = 0
    reason: str = ""
    pause: int = 0
    without_products: int = 0
    samples: list[Samples] = attrs.field(init=False)
    row_samples: dict[int, Samples] = attrs.field(factory=dict)
    _chains: Sequence[range] = ()
    _tried_chains: Sequence[range] = attrs.field(init=False)
    known: dict[tuple[int, int], KnownChain] = attrs.field(factory=dict)

    def __attrs_post_init__(self) -> None:
        self.samples = [Samples() for _ in self.products]
        self._tried_chains = chains(self.products, self.rows, None)

    def compute(self, number: int, operands: Operands) -> torch.Tensor | None:
        """Return the result of product `number` for all sessions. If the product is not batched, return None."""
        way = self.ways[number] if self.ways else None
        return None if way is None else self._computed(self.products[number], way, operands)

    def try_product(
        self, number: int, operands: Operands, alone: Callable[[int], torch.Tensor], unwritten: bool
    ) -> Sequence[torch.Tensor]:
        """Measure product `number` with each batching method. Return the separately computed result of each session.

        Args:
            number: index of the product.
            operands: operands for all sessions.
            alone: computes the result of one session, by its index.
            unwritten: True if no program writes the weight, so that a packed copy stays valid.
        """
        product, samples = self.products[number], self.samples[number]
        if unwritten:
            self._pack(product, operands)
        results = self._alone(samples, len(operands.sizes), alone)
        samples.weight = place_of(operands.weight)
        for way in WAYS:
            self._try(way, samples, results, operands.sizes, partial(self._computed, product, way, operands))
        return results

    def try_row(
        self,
        step: int,
        sizes: Sequence[int],
        alone: Callable[[int], torch.Tensor],
        together: Callable[[], torch.Tensor],
    ) -> Sequence[torch.Tensor]:
        """Measure a row-wise instruction with and without batching.

        Return the separately computed result of each session.

        Args:
            step: number of the instruction.
            sizes: number of rows of each session.
            alone: computes the result of one session, by its index.
            together: computes the result for all sessions at once.
        """
        samples = self.row_samples.setdefault(step, Samples(ways={"joined": math.inf}))
        results = self._alone(samples, len(sizes), alone)
        self._try("joined", samples, results, sizes, together)
        return results

    def begin(self, sessions: int) -> None:
        """Start a batch of `sessions` sessions.

        The trial restarts if there are at least twice as many sessions as when it started, because another method may
        be faster.
        """
        if sessions >= 2 * self.sessions:
            self.sessions, self.decided = sessions, False
            self._restart()
        self.trying = not self.decided and 2 * sessions > self.sessions

    @property
    def chains(self) -> Sequence[range]:
        """Return the chains of instructions to batch, or during a trial all chains that could be batched."""
        return self._tried_chains if self.trying else self._chains

    def remember(self, start: int, chain: KnownChain | None) -> None:
        """Cache the recorded chain that starts at instruction `start`, for its number of runs."""
        if not self.trying and chain is not None:
            self.known[start, len(chain.sizes)] = chain

    def decide(self, computed: int) -> bool:
        """End the trial if every product has enough measurements, and choose the batching method.

        Return True if it ended.

        `computed`: number of products that the last batch has batched.
        """
        self.without_products = 0 if computed else self.without_products + 1
        if self.without_products >= CHECKS:
            self.without_products, self.pause = 0, PAUSE
        tried = [one for one in self.samples if one.runs]
        if not self.trying or not tried or min(one.runs for one in tried) < CHECKS:
            return False
        # One method for all products: the timing of a single product is too noisy.
        seconds = {way: sum(one.seconds(way) for one in tried) for way in WAYS}
        way = min(WAYS, key=lambda one: seconds[one])
        gained = seconds[way] / max(sum(one.alone for one in tried), 1e-9)
        if gained > GAIN:
            differing = [one.difference for one in tried if one.difference]
            self.reason = differing[0] if differing else f"a batch takes {gained:.2f} of the time"
            self.refused, self.ways, self._chains = self.sessions, (), ()
        else:
            self.ways = [way if math.isfinite(one.ways[way]) else None for one in self.samples]
            self._chains = chains(self.products, self.rows, self._decide_rows())
            self.refused, self.reason = 0, ""
        for sample, taken in zip(self.samples, self.ways or [None] * len(self.samples), strict=True):
            if taken != "packed" and sample.weight is not None:
                self.packed.drop(sample.weight, self)
        self.decided, self.known = True, {}
        self._restart()
        return True

    def _restart(self) -> None:
        self.samples, self.row_samples = [Samples() for _ in self.products], {}

    def _decide_rows(self) -> frozenset[int]:
        """Return the row-wise instructions to batch: all with equal results, or none if batching is not faster."""
        tried = {step: one for step, one in self.row_samples.items() if math.isfinite(one.ways["joined"])}
        together = sum(one.ways["joined"] for one in tried.values())
        return frozenset(tried if together <= GAIN * sum(one.alone for one in tried.values()) else ())

    def _alone(self, samples: Samples, sessions: int, alone: Callable[[int], torch.Tensor]) -> Sequence[torch.Tensor]:
        begun = self.timer.mark()
        results = [alone(session) for session in range(sessions)]
        samples.alone = min(samples.alone, self._seconds_since(begun))
        samples.runs += 1
        return results

    def _pack(self, product: Product, operands: Operands) -> None:
        try:
            self.packed.pack(operands.weight, product.transposed, len(operands.rows), self)
        except Exception as error:
            _log.debug("a weight cannot be packed", error=repr(error))

    def _try(
        self,
        way: Way,
        samples: Samples,
        results: Sequence[torch.Tensor],
        sizes: Sequence[int],
        together: Callable[[], torch.Tensor | None],
    ) -> None:
        if way in samples.refused:
            return
        try:
            begun = self.timer.mark()
            made = together()
            seconds = self._seconds_since(begun)
            if made is None:
                return
            found = split_rows(made, sizes, [result.shape for result in results])
            difference = next(filter(None, map(_difference, results, found)), "")
        except Exception as error:
            difference = f"it raised {type(error).__name__}: {error}"
        if difference:
            samples.difference = difference
            samples.refused.add(way)
        samples.ways[way] = math.inf if difference else min(samples.ways[way], seconds)

    def _computed(self, product: Product, way: Way, operands: Operands) -> torch.Tensor | None:
        weight, bias, rows = operands.weight, operands.bias, operands.rows
        packed = self.packed.get(weight) if way == "packed" else None
        if way == "packed" and packed is None:
            return None
        if packed is not None:
            return torch_private.packed_product(rows, packed, bias)
        if product.transposed:
            return torch.nn.functional.linear(rows, weight, bias)
        return torch.matmul(rows, weight) if bias is None else torch.addmm(bias, rows, weight)

    def _seconds_since(self, begun: Any) -> float:
        ended = self.timer.mark()
        self.timer.wait(ended)
        return self.timer.seconds(begun, ended)


def split_rows(rows: torch.Tensor, sizes: Sequence[int], shapes: Sequence[torch.Size]) -> Sequence[torch.Tensor]:
    """Return the rows of each session as a separate copy, so that sessions cannot write into each other's rows."""
    parts = torch.ops.aten.split_with_sizes_copy(rows, sizes)
    return [part if part.shape == shape else part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def _difference(expected: torch.Tensor, found: torch.Tensor) -> str:
    """Describe how a result differs from the session's own result. Return an empty text if only rounding differs."""
    if other := layout_difference(expected, found):
        return other
    largest = max(1.0, float(expected.abs().max())) if expected.numel() else 1.0
    relative, absolute = torch_private.default_tolerances(expected.dtype)
    scaled = absolute * (largest if math.isfinite(largest) else 1.0)
    close = torch.allclose(found, expected, rtol=relative, atol=scaled, equal_nan=True)
    return "" if close else "results differ by more than rounding"
