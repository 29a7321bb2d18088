"""Faulty plugins of the client do not change results, and the log names each faulty plugin."""

from __future__ import annotations

import sys

import attrs
import pytest
import torch
from configured import configured

import djinn
from djinn.hooks import CostModel, Integration, Observer, Optimization, Pattern, PlacementPolicy, Scheduler, hookimpl
from djinn.planning import CostEstimate, OptimizationResult, PatternMatch, Rewrite

REMOTE = "remote_accelerator:0"
LIBRARY = "sndhdr" if sys.version_info < (3, 12) else "wave"


def raises(*_):
    raise KeyError("oops")


@attrs.define
class Faulty(Pattern, CostModel, Optimization, PlacementPolicy, Scheduler):
    """A plugin object of any kind. Each method calls `does`."""

    name: str
    does: object
    operations: frozenset[str] = frozenset({"mm", "add"})

    def match(self, *given):
        return self.does(*given)

    estimate = optimize = place = priority = observe = match


class FaultyObserver(Faulty, Observer):
    pass


class FaultyTracer(FaultyObserver):
    def observe(self, event):
        pass

    def trace_context(self, kind, executor, number):
        return self.does(kind)


def tied_matches(*_, **fields):
    return [
        PatternMatch("a", (0,), 0.5, "so"),
        PatternMatch("a", [0], 0.5, "so"),
        PatternMatch("a", (0,), 0.5, **fields),
    ]


@attrs.define(eq=False)
class Plugin:
    djinn_api_version: str = "2.0"

    @hookimpl
    def djinn_register_patterns(self):
        return [
            Faulty("hints_none", lambda *_: tied_matches(reason="so", hints=None)),
            Faulty("phase_text", lambda *_: tied_matches(reason="so", phase="llm_decode")),
            Faulty("match_none", lambda *_: None),
        ]

    @hookimpl
    def djinn_register_cost_models(self):
        return [Faulty("cost_text", lambda *_: CostEstimate(1, 1, 1, "fast")), Faulty("cost_raises", raises)]

    @hookimpl
    def djinn_register_optimizations(self):
        return [
            Faulty("drops_text", lambda _: OptimizationResult("drops_text", True, "so", Rewrite(drop={"a"}))),
            Faulty("rewrites_none", lambda _: OptimizationResult("rewrites_none", True, "so", None)),
        ]

    @hookimpl
    def djinn_register_placement_policies(self):
        return [Faulty("places_none", lambda _: None)]

    @hookimpl
    def djinn_register_schedulers(self):
        return [Faulty("schedules_text", lambda _: "now")]

    @hookimpl
    def djinn_register_observers(self):
        return [
            FaultyObserver("observe_raises", raises),
            FaultyTracer("trace_raises", raises),
            FaultyTracer("trace_text", lambda _: "now"),
        ]

    @hookimpl
    def djinn_register_integrations(self):
        return [Integration("adapt_raises", LIBRARY, raises)]


NAMES = (
    *(
        "hints_none",
        "phase_text",
        "match_none",
        "cost_text",
        "cost_raises",
        "drops_text",
        "rewrites_none",
        "places_none",
    ),
    *("schedules_text", "observe_raises", "trace_raises", "trace_text"),
)


@pytest.mark.filterwarnings("ignore:'sndhdr' is deprecated")
def test_program_runs_with_faulty_plugins_and_logs_each(caplog):
    torch.manual_seed(0)
    x, weight = torch.randn(4, 4), torch.randn(4, 4)
    settings = {
        "placement_policy": "places_none",
        "scheduler": "schedules_text",
        "exact": False,
    }
    with configured(plugins=[Plugin()], **settings):
        djinn.init()
        __import__(LIBRARY)
        for _ in range(2):
            made = torch.relu(x.to(REMOTE) @ weight.to(REMOTE) + 1)
            assert torch.equal(made.cpu(), torch.relu(x @ weight + 1))
        text = [record.getMessage() + str(vars(record)) for record in caplog.records if record.levelname == "WARNING"]
    for name in NAMES:
        assert any(name in line for line in text), name
    assert any(LIBRARY in line and "oops" in line for line in text)
