"""Trials of products over several sessions: the results are compared with those of the sessions one by one, and both are timed.

As long as a trial runs, each session gets the results that it computed by itself.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Final, Literal

import attrs
import torch

from djinn_core import torch_private
from djinn_core.logs import get_logger
from djinn_core.server.batching.products import Product
from djinn_core.server.batching.weights import PackedWeights, WeightPlace, place_of

CHECKS: Final = 3  # batches of a trial
GAIN: Final = 0.9  # the largest share of the time one by one that a batch may take
PAUSE: Final = 64  # runs
ROWS: Final = 64  # more are not joined: products with many rows are not bound by reading weights
_ABSOLUTE: Final = {torch.float32: 1e-5, torch.float64: 1e-7, torch.float16: 1e-5, torch.bfloat16: 1e-5}
_RELATIVE: Final = {torch.float32: 1.3e-6, torch.float64: 1e-7, torch.float16: 1e-3, torch.bfloat16: 1.6e-2}

_log = get_logger("djinn.server")

Way = Literal["packed", "joined"]
WAYS: Final[tuple[Way, ...]] = ("packed", "joined")


@attrs.frozen
class Operands:
    """Operands of one product: the rows of each session, and the weight and the bias that they share."""

    rows: Sequence[torch.Tensor]
    weight: torch.Tensor
    bias: torch.Tensor | None

    @property
    def count(self) -> int:
        """Number of rows of all sessions."""
        return sum(rows.numel() // rows.shape[-1] for rows in self.rows)


@attrs.define
class Samples:
    """Samples of one product: the least seconds one by one, and of the ways that gave the same results."""

    alone: float = math.inf
    ways: dict[Way, float] = attrs.field(factory=lambda: dict.fromkeys(WAYS, math.inf))
    difference: str = ""
    runs: int = 0
    weight: WeightPlace | None = None

    def seconds(self, way: Way) -> float:
        """The least seconds where products are computed in a way, this one by itself if it cannot be."""
        return self.ways[way] if math.isfinite(self.ways[way]) else self.alone


@attrs.define(eq=False)
class Trial:
    """Trial of the products of a template with the weights of one model.

    Attributes:
        ways: how each product is computed for several sessions; None: not at all. Empty until that is decided.
        refused: number of sessions up to which it did not pay; 0: it pays, or is not decided.
        reason: why it did not.
        pause: runs that are to be no batches, after some in which no product could be computed for several sessions.
    """

    products: Sequence[Product]
    packed: PackedWeights
    synchronize: Callable[[], None]
    ways: Sequence[Way | None] = ()
    refused: int = 0
    reason: str = ""
    pause: int = 0
    without_products: int = 0
    samples: list[Samples] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.samples = [Samples() for _ in self.products]

    def compute(
        self, number: int, operands: Operands, alone: Callable[[int], torch.Tensor], unwritten: bool
    ) -> Sequence[torch.Tensor] | None:
        """The results of product `number` for each session; None where each computes it by itself.

        `alone` computes that of one session; `unwritten`: nothing ever writes the weight.
        """
        product = self.products[number]
        if operands.count > ROWS:
            return None
        if not self.ways:
            return self._tried(product, self.samples[number], operands, alone, unwritten)
        way = self.ways[number]
        return None if way is None else self._computed(product, way, operands)

    def decide(self, sessions: int, computed: int) -> bool:
        """Decide after a batch of so many sessions, if every product was tried often enough; whether it is decided now.

        `computed`: how many of its products were computed for several sessions.
        """
        self.without_products = 0 if computed else self.without_products + 1
        if self.without_products >= CHECKS:
            self.without_products, self.pause = 0, PAUSE
        tried = [one for one in self.samples if one.runs]
        if self.ways or not tried or min(one.runs for one in tried) < CHECKS:
            return False
        # One way for all of them: what is measured of one product alone depends on what else the machine does.
        seconds = {way: sum(one.seconds(way) for one in tried) for way in WAYS}
        way = min(WAYS, key=lambda one: seconds[one])
        gained = seconds[way] / max(sum(one.alone for one in tried), 1e-9)
        if gained > GAIN:
            differing = [one.difference for one in tried if one.difference]
            self.reason = differing[0] if differing else f"a batch takes {gained:.2f} of the time"
            self.refused = sessions
        else:
            self.ways = [way if math.isfinite(one.ways[way]) else None for one in self.samples]
            self.refused, self.reason = 0, ""
        for sample, taken in zip(self.samples, self.ways or [None] * len(self.samples), strict=True):
            if taken != "packed" and sample.weight is not None:
                self.packed.drop(sample.weight)
        self.samples = [Samples() for _ in self.products]
        return True

    def _tried(
        self,
        product: Product,
        samples: Samples,
        operands: Operands,
        alone: Callable[[int], torch.Tensor],
        unwritten: bool,
    ) -> Sequence[torch.Tensor]:
        if unwritten:
            self._pack(product, operands)
        began = self._now()
        results = [alone(session) for session in range(len(operands.rows))]
        samples.alone = min(samples.alone, self._now() - began)
        samples.runs, samples.weight = samples.runs + 1, place_of(operands.weight)
        for way in WAYS:
            try:
                self._try(product, way, samples, operands, results)
            except Exception as error:
                samples.ways[way], samples.difference = math.inf, f"it raised {type(error).__name__}: {error}"
        return results

    def _pack(self, product: Product, operands: Operands) -> None:
        try:
            self.packed.pack(operands.weight, product.transposed, operands.count)
        except Exception as error:
            _log.debug("a weight cannot be packed", error=repr(error))

    def _try(
        self, product: Product, way: Way, samples: Samples, operands: Operands, results: Sequence[torch.Tensor]
    ) -> None:
        began = self._now()
        found = self._computed(product, way, operands)
        if found is None:
            return
        seconds = self._now() - began
        difference = next(filter(None, map(_difference, results, found)), "")
        if difference:
            samples.difference = difference
        samples.ways[way] = math.inf if difference else min(samples.ways[way], seconds)

    def _computed(self, product: Product, way: Way, operands: Operands) -> Sequence[torch.Tensor] | None:
        weight, bias = operands.weight, operands.bias
        packed = self.packed.get(weight) if way == "packed" else None
        if way == "packed" and packed is None:
            return None
        flat = [rows if rows.dim() == 2 else rows.reshape(-1, rows.shape[-1]) for rows in operands.rows]
        stacked = torch.cat(flat)
        if packed is not None:
            made = torch_private.packed_product(stacked, packed, bias)
        elif product.transposed:
            made = torch.nn.functional.linear(stacked, weight, bias)
        else:
            made = torch.mm(stacked, weight) if bias is None else torch.addmm(bias, stacked, weight)
        # Each has memory of its own: nothing that a session does with its results reaches another's.
        parts = torch.ops.aten.split_with_sizes_copy(made, [len(rows) for rows in flat])
        return [
            part if rows.dim() == 2 else part.view(*rows.shape[:-1], -1)
            for part, rows in zip(parts, operands.rows, strict=True)
        ]

    def _now(self) -> float:
        self.synchronize()
        return time.perf_counter()


def _difference(expected: torch.Tensor, found: torch.Tensor) -> str:
    """Describe how a result differs from what its session computed; empty: not beyond rounding."""
    theirs, ours = _layout(expected), _layout(found)
    if theirs != ours:
        return f"a result is laid out as {ours} in place of {theirs}"
    largest = max(1.0, float(expected.abs().max())) if expected.numel() else 1.0
    dtype = expected.dtype
    close = torch.allclose(
        found,
        expected,
        rtol=_RELATIVE.get(dtype, 0.0),
        atol=_ABSOLUTE.get(dtype, 0.0) * (largest if math.isfinite(largest) else 1.0),
        equal_nan=True,
    )
    return "" if close else "results differ by more than rounding"


def _layout(tensor: torch.Tensor) -> tuple[object, ...]:
    storage = tensor.untyped_storage().nbytes()
    return tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.dtype, storage
