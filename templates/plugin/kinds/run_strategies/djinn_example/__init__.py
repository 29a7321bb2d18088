"""A run strategy for Djinn: compute `relu(x + y)` with one op and without the tensor between."""

from __future__ import annotations

from collections.abc import Iterator

from djinn.hooks import RunOffer, RunStrategy, StrategyRun, TemplateFacts, hookimpl

djinn_api_version = "2.0"


class Fused(RunOffer):
    """Replaces the pairs of ops that begin at `pairs`."""

    def __init__(self, pairs: list[int]) -> None:
        self.pairs = pairs

    def run(self, run: StrategyRun) -> Iterator[None]:
        """Run up to each pair, and compute its result in place of it."""
        for first in self.pairs:
            yield from run.advance(first)
            (x, y), options = run.arguments(first)
            (place,) = run.facts.ops[first + 1].makes
            yield from run.replace(first + 2, {place: x.add(y, **options).relu_()})


class ExampleStrategy(RunStrategy):
    """Used where it is faster than the ops."""

    name = "example"

    def acts_on(self, template: TemplateFacts) -> RunOffer | None:
        """Return an offer if an addition is followed by a ReLU that alone uses its result."""
        ops = template.ops
        pairs = [
            first
            for first, (one, other) in enumerate(zip(ops, ops[1:], strict=False))
            if (one.name, other.name) == ("aten::add.Tensor", "aten::relu")
            and len(one.reads) == 2
            and one.makes == other.reads
            and one.makes[0] in other.releases
        ]
        return Fused(pairs) if pairs else None


@hookimpl
def djinn_register_run_strategies() -> list[RunStrategy]:
    """Return the run strategies of this plugin."""
    return [ExampleStrategy()]
