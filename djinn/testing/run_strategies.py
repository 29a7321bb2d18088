"""Conformance suite for run strategies."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch

from djinn.testing.suite import Ending, missing, require_protocol
from djinn_client.runtime.client import configure, shut_down
from djinn_core.hookspecs import API_VERSION, hookimpl
from djinn_server.hookspecs.run_strategies import (
    RunOffer,
    RunStrategy,
    Stage,
    StrategyContext,
    StrategyRun,
    TemplateFacts,
)

RUNS = 12  # the first two compare results; later runs alternate between strategy and ops
Programs = Mapping[str, tuple[Callable[..., torch.Tensor], tuple[torch.Tensor, ...]]]


class _Counted(RunOffer):
    def __init__(self, offer: RunOffer) -> None:
        self.offer, self.runs = offer, 0
        self.checked = offer.checked

    def run(self, run: StrategyRun) -> Iterator[None]:
        self.runs += 1
        yield from self.offer.run(run)

    def stage(self) -> Stage:
        return self.offer.stage()

    def ran(self, seconds: float) -> None:
        self.offer.ran(seconds)

    def decided(self, ratio: float, *, used: bool, reason: str) -> None:
        self.offer.decided(ratio, used=used, reason=reason)


class _Watched(RunStrategy):
    """Wrapper of the strategy under test that counts its offers. It registers itself as a plugin does."""

    djinn_api_version = API_VERSION

    def __init__(self, strategy: RunStrategy) -> None:
        self.strategy, self.name, self.exact = strategy, strategy.name, strategy.exact
        self.caches_results = strategy.caches_results
        self.offers: list[_Counted] = []

    def begin(self, context: StrategyContext) -> bool:
        return self.strategy.begin(context)

    def acts_on(self, template: TemplateFacts) -> RunOffer | None:
        offer = self.strategy.acts_on(template)
        if offer is None:
            return None
        self.offers.append(_Counted(offer))
        return self.offers[-1]

    @hookimpl
    def djinn_register_run_strategies(self) -> list[RunStrategy]:
        return [self]


class RunStrategyConformance(Ending):
    """Tests that every run strategy must pass.

    Subclass this class and define the fixtures `strategy` and `programs`. `programs` maps names to pairs: a function of
    tensors for which the strategy makes an offer, and the function's inputs on the CPU. An executor in a thread of the
    test runs the functions.
    """

    @pytest.fixture
    def strategy(self) -> RunStrategy:
        """Return the run strategy under test."""
        return missing(self, "strategy", "your run strategy")  # type: ignore[return-value]

    @pytest.fixture
    def programs(self) -> Programs:
        """Return programs for which the strategy makes an offer, by name."""
        return missing(self, "programs", "functions with their inputs, by name")  # type: ignore[return-value]

    def test_run_strategy_has_every_member(self, strategy: RunStrategy) -> None:
        """The strategy has all members of `RunStrategy`, and makes no offer for a template without ops."""
        require_protocol(strategy, "run_strategies")
        assert strategy.acts_on(TemplateFacts((), torch.device("cpu"))) is None, (
            "`acts_on` must return None for a template without ops"
        )

    def test_results_match_the_ops(self, strategy: RunStrategy, programs: Programs) -> None:
        """Each program returns equal results in each run, and the strategy runs at least a part of it."""
        assert programs, "the fixture `programs` must return at least one program"
        try:
            for name, (program, inputs) in programs.items():
                self._compare(strategy, name, program, inputs)
        finally:
            shut_down()
            configure()

    def _compare(self, strategy: RunStrategy, name: str, program: Callable[..., Any], inputs: tuple[Any, ...]) -> None:
        watched = _Watched(strategy)
        shut_down()
        configure(executor="inline", plugins=[watched], exact=strategy.exact, threads=1)
        remote = [tensor.to("remote_accelerator:0") for tensor in inputs]
        expected = program(*inputs)
        tolerance = 0.0 if strategy.exact else None
        for _ in range(RUNS):
            result = program(*remote).cpu()
            torch.testing.assert_close(result, expected, rtol=tolerance, atol=tolerance, equal_nan=True)
        assert watched.offers, f"{name}: the strategy makes no offer for this program"
        assert max(offer.runs for offer in watched.offers) >= RUNS // 3, f"{name}: the executor rejected the strategy"
