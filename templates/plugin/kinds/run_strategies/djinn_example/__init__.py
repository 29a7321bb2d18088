"""A run strategy for Djinn: compute `relu(x + y)` in the memory of the sum."""

from __future__ import annotations

from collections.abc import Iterator

from djinn.hooks import RunOffer, RunStrategy, StrategyRun, TemplateFacts, hookimpl

djinn_api_version = "2.0"


class AddRelu(RunOffer):
    """Replace an addition and the ReLU after it."""

    def __init__(self, add: int) -> None:
        self.add = add

    def run(self, run: StrategyRun) -> Iterator[None]:
        """Run the ops before the addition, and use the new tensor as the result of the ReLU."""
        yield from run.advance(self.add)
        (x, y), options = run.arguments(self.add)
        yield from run.replace(self.add + 2, {run.facts.ops[self.add + 1].makes[0]: x.add(y, **options).relu_()})


class ExampleStrategy(RunStrategy):
    """Used if it is faster than the ops."""

    name = "example"

    def acts_on(self, template: TemplateFacts) -> RunOffer | None:
        """Return an offer if only a ReLU reads the sum of two tensors."""
        pairs = enumerate(zip(template.ops, template.ops[1:], strict=False))
        found = [i for i, (a, b) in pairs if (a.name, b.name, a.makes) == ("aten::add.Tensor", "aten::relu", b.releases)]
        return AddRelu(found[0]) if found else None


@hookimpl
def djinn_register_run_strategies() -> list[RunStrategy]:
    """Return the run strategies of this plugin."""
    return [ExampleStrategy()]
