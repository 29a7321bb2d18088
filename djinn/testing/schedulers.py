"""Conformance suite for schedulers."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from djinn.testing.contexts import scheduling_context
from djinn.testing.suite import OnGraphs, missing, require_protocol
from djinn_core.hookspecs.schedulers import Scheduler
from djinn_core.ir.graph import Graph
from djinn_core.planning.stages.schedule import build_schedule
from djinn_core.planning.stages.verify_schedule import check_schedule


class SchedulerConformance(OnGraphs):
    """Tests that every scheduler must pass. Subclass this class and define the fixture `scheduler`."""

    @pytest.fixture
    def scheduler(self) -> Scheduler:
        """Return the scheduler under test."""
        return missing(self, "scheduler", "your scheduler")  # type: ignore[return-value]

    def test_scheduler_has_every_member(self, scheduler: Scheduler) -> None:
        """The scheduler has all attributes and methods of `Scheduler`."""
        require_protocol(scheduler, "schedulers")

    @pytest.mark.parametrize("devices", [1, 2, 3])
    def test_schedules_are_legal(self, scheduler: Scheduler, graphs: Mapping[str, Graph], devices: int) -> None:
        """Every node runs once, on its device and after its dependences. Repeated calls return equal schedules."""
        for name, graph in graphs.items():
            context = scheduling_context(graph, devices)
            schedule = build_schedule(context, scheduler)
            check_schedule(context, schedule, f"{scheduler.name} on {name}")
            again = build_schedule(context, scheduler)
            assert (again.groups, again.steps) == (schedule.groups, schedule.steps), f"{name}: two different schedules"
