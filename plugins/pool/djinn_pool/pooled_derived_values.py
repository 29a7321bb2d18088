"""Cache of values derived from weights. The executor of the first plan that uses them computes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from djinn_client.runtime.planning.derived_values import DerivedValues
from djinn_client.sink import Submission
from djinn_core.hookspecs.schedulers import SchedulingContext
from djinn_core.ir.costs import Costs, NetworkTopology
from djinn_core.ir.graph import Graph
from djinn_core.ir.handles import storage_of
from djinn_core.ir.placement import Placement, PlacementDecision
from djinn_core.ir.plan import OptimizationPlan
from djinn_core.ir.program import Program
from djinn_core.ir.schedule import ExecutionSchedule
from djinn_core.ir.substitution import Recipe, RecipeLocations, RewrittenProgram
from djinn_core.planning.stages.steps import write_steps
from djinn_pool.lowering import ProgramPlacement, build_plan, resident
from djinn_pool.parts import PooledPlan, named
from djinn_pool.value_locations import ValueLocations

RunPlan = Callable[[PooledPlan, Program], None]


class PooledDerivedValues:
    """Values of a pool that are derived from weights. The caller of each method holds the sink's lock."""

    def __init__(self, devices: Sequence[str], locations: ValueLocations, run: RunPlan) -> None:
        """Create an empty cache.

        Args:
            devices: device id of each executor, by number.
            locations: locations of all values.
            run: function that submits a plan of a program.
        """
        self._devices = tuple(devices)
        self._locations = locations
        self._run = run
        self.values = DerivedValues(lambda _: 0)

    def join(self, device: str) -> None:
        """Add an executor with this device."""
        self._devices = (*self._devices, device)

    def places(self, recipe: Recipe) -> RecipeLocations | None:
        """Return the locations of a recipe's values, or None if the values have not been computed."""
        results = self.values.cached((recipe.identity, recipe.sources))
        if results is None:
            return None
        homes = tuple(self._devices[self._locations.homes[storage_of(v)]] for v in results)
        copies = [self._locations.copies(v) or () for v in results]
        return RecipeLocations(homes, tuple(tuple(self._devices[e] for e in sorted(h)) for h in copies))

    def make_missing(self, rewritten: RewrittenProgram, placed: Mapping[int, str]) -> bool:
        """Compute the missing values of the program's recipes. Return True if any were missing.

        `placed`: device id of each value, as the plan chose it.
        """
        missing = [r for r in rewritten.recipes if self.values.cached((r.identity, r.sources)) is None]
        for recipe in missing:
            executor = self._devices.index(placed[recipe.placeholders[0]])
            self.values.compute((recipe.identity, recipe.sources), recipe, self._on(executor))
        return bool(missing)

    def names(self, rewritten: RewrittenProgram) -> dict[int, int]:
        """Return the handles of the computed values of the program's recipes, by value id."""
        names: dict[int, int] = {}
        for recipe in rewritten.recipes:
            names |= zip(recipe.placeholders, self.values.cached((recipe.identity, recipe.sources)) or (), strict=True)
        return names

    def extended(self, plan: PooledPlan, values: Sequence[int]) -> Sequence[int]:
        """Return the values of a run, then the derived values and the plan's own values. Compute missing derived values."""
        if plan.rewrite is None:
            return values
        run_values = list(values)
        for recipe, identity, positions in plan.rewrite.recipes:
            key = (identity, tuple([values[i] for i in positions]))
            run_values += self.values.cached(key) or self.values.compute(
                key, recipe, self._on(self._home(plan, len(run_values)))
            )
        return run_values + named(plan.own, values)

    @staticmethod
    def _home(plan: PooledPlan, position: int) -> int:
        """Return the executor on which `plan` expects the input at `position`."""
        home = plan.where[0][plan.inputs.index(position)]
        return home if home is not None else 0

    def _on(self, executor: int) -> Callable[[Submission], object]:
        return lambda submission: self._run(self._all_on(submission.program, executor), submission.program)

    def _all_on(self, program: Program, executor: int) -> PooledPlan:
        """Return a plan in which `executor` runs all nodes and gets copies of weights from other executors."""
        graph, names, device = Graph(program), self._devices, self._devices[executor]
        homes = {v: names[e] for v, e in resident(program, graph, self._locations, None).items()}
        nodes = tuple(node.id for node in graph.nodes)
        device_of = {v: device for node in graph.nodes for v in node.outputs}
        values = {**{v: homes.get(v, device) for v in graph.inputs}, **device_of}
        decisions = tuple(
            PlacementDecision(node, device, "a plan uses the derived values on this device") for node in nodes
        )
        copies_by_value = {v: tuple(names[e] for e in sorted(self._locations.copies(v) or ())) for v in graph.inputs}
        copies = {v: holders for v, holders in copies_by_value.items() if holders}
        context = SchedulingContext(
            program,
            graph,
            OptimizationPlan(nodes),
            Placement(decisions, values),
            Costs({}),
            NetworkTopology(()),
            homes,
            copies=copies,
        )
        schedule = ExecutionSchedule(program, (), write_steps(context, nodes))
        executors = {name: number for number, name in enumerate(names)}
        executor_of = {value: executors[home] for value, home in values.items()}
        return build_plan(ProgramPlacement(graph, executor_of, executors, schedule, graph), self._locations, None)
