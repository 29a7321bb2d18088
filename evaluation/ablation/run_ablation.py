"""Ablation: plan every program without each pattern and each optimization that acts on it, and compare the plans.

    python -m evaluation ablation [--models gpt2,llama | --every 3] [--run] [--json]

Programs are an evaluation step and a training step of each model of the zoo, and the scenarios. Each is planned for one
and for two devices of `scenarios.CLUSTER`, with all installed plugins (`exact=False`) and without one part. A part acts
on a program if the two plans differ in simulated time, transferred bytes, transfers or kernel launches. A part belongs
into the default if it saves 10 % of the time or more in over half of the programs on which it acts, and costs more than
2 % in none.

With --run each model on which a part acts also runs, on one executor, two executors and `fakegpu`, with the part's plugin and without it: bytes,
messages and round trips of a steady evaluation step as the client counts them, launches and time as `fakegpu` does.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence

import attrs

from djinn.errors import DoesNotFit
from djinn_client.interception.recording.substitute import rewrite
from djinn_core.ir.flow import is_view
from djinn_core.ir.graph import Graph
from djinn_core.ir.schedule import Fetch, Run, Send, Upload
from djinn_core.planning.request import PluginOverrides, Plugins
from djinn_profiler.plans.cluster_plan import ClusterPlan, plan_for_cluster, planning_plugins
from evaluation.ablation.real_runs import acting, effect_table, runs
from evaluation.ablation.scenarios import SCENARIOS, cluster, seconds_of
from evaluation.clusters.zoo_clusters import record
from evaluation.zoo.catalogue import ZOO

GAIN, LOSS = 0.10, 0.02
ON = {"cleanup": {"on": True}}  # off by default
CLUSTERS = {"one": 1, "two": 2}
KINDS = ("patterns", "optimizations")
Planner = Callable[[int, Plugins], list[ClusterPlan]]


@attrs.frozen
class Case:
    """A program with planning options for a number of devices."""

    name: str
    plans: Planner


@attrs.frozen
class Figures:
    """Simulated figures of one run. `bytes`: bytes transferred between devices and to and from the client."""

    ms: float
    bytes: int
    transfers: int
    launches: int


@attrs.frozen
class Compared:
    """One program on one cluster, planned with and without a part (a pattern or an optimization)."""

    case: str
    cluster: str
    part: str
    with_it: Figures
    without: Figures

    @property
    def acts(self) -> bool:
        """Return True if the plans differ."""
        return self.with_it != self.without

    @property
    def gain(self) -> float:
        """Return the share of the time that the part saves. It is negative if the part costs time."""
        return 1 - self.with_it.ms / self.without.ms


@attrs.frozen
class Verdict:
    """Effect of a part on all programs of a cluster.

    Attributes:
        matched: number of programs that the part matched or changed. acts: number of programs whose plan it changes.
        gains: number of programs in which it saves at least 10 % of the time. loses: number in which it costs more than 2 %.
        median, worst: median and smallest share of time saved in programs on which it acts.
        launches, bytes: relative change of the sum over these programs.
    """

    part: str
    cluster: str
    matched: int
    acts: int
    gains: int
    loses: int
    median: float
    worst: float
    launches: float
    bytes: float

    @property
    def by_default(self) -> bool:
        """Return True if the rule puts the part into the default."""
        return 2 * self.gains > self.acts and not self.loses


def cases(models: Sequence[str], *, scenarios: bool) -> Iterator[Case]:
    """Yield the programs of models of the zoo, and the scenarios."""
    for name, graph in record(models).graphs.items():
        yield Case(name, lambda count, plugins, graph=graph: [plan_program(graph, count, plugins)])
    for scenario in SCENARIOS if scenarios else ():
        graph = scenario.graph()
        yield Case(scenario.name, lambda count, plugins, s=scenario, graph=graph: s.plans(graph, count, plugins))


def plan_program(graph: Graph, count: int, plugins: Plugins) -> ClusterPlan:
    """Return the plan of a program of the zoo for `count` devices."""
    return plan_for_cluster(graph, cluster(count), plugins, exact=False, rewrite=rewrite)


def figures_of(plans: Sequence[ClusterPlan]) -> Figures:
    """Return the figures of a run. `plans`: one plan, or one per device that processes a stream in rotation.

    For several plans, counts are means, and the time is that of `seconds_of`.
    """
    on_device = transfers = launches = 0
    for plan in plans:
        schedule, line = plan.result.schedule, plan.timeline
        assert schedule is not None
        steps = [step for steps in schedule.steps.values() for step in steps]
        nodes = [plan.result.graph.nodes[n] for step in steps if isinstance(step, Run) for n in step.nodes]
        launches += sum(not is_view(node) for node in nodes)
        transfers += sum(isinstance(step, Send | Upload | Fetch) for step in steps)
        on_device += line.uploaded + line.fetched + sum(device.sent for device in line.devices.values())
    return Figures(seconds_of(plans) * 1e3, on_device // len(plans), transfers // len(plans), launches // len(plans))


def parts_in(plans: Sequence[ClusterPlan]) -> set[tuple[str, str]]:
    """Return pairs of kind and name for matching patterns and applied optimizations."""
    results = set()
    for plan in plans:
        for result in (plan.first, plan.result):
            for profile in (result.recorded_profile, result.profile):
                results |= {("patterns", match.pattern) for match in (profile.patterns if profile else ())}
            results |= {
                ("optimizations", r.optimization) for r in (result.plan.results if result.plan else ()) if r.applied
            }
    return results


def without(plugins: Plugins, kind: str, name: str) -> Plugins:
    """Return the plugins without the part `name` of the kind `kind`."""
    return PluginOverrides(plugins, **{kind: tuple(item for item in getattr(plugins, kind) if item.name != name)})


def compare(case: Case, plugins: Plugins) -> Iterator[Compared]:
    """Plan a program with all parts, and without each relevant part."""
    for name, count in CLUSTERS.items():
        try:
            plans = case.plans(count, plugins)
        except DoesNotFit:  # a scenario that needs two devices
            continue
        for kind, part in sorted(parts_in(plans)):
            others = case.plans(count, without(plugins, kind, part))
            yield Compared(case.name, name, part, figures_of(plans), figures_of(others))


def verdicts(found: Sequence[Compared]) -> list[Verdict]:
    """Return one row per part and cluster, acting parts first."""
    rows = []
    for part, where in sorted({(item.part, item.cluster) for item in found}):
        comparisons = [item for item in found if (item.part, item.cluster) == (part, where)]
        acts = [item for item in comparisons if item.acts]
        gains = sorted(item.gain for item in acts) or [0.0]
        rows.append(
            Verdict(
                part,
                where,
                len(comparisons),
                len(acts),
                sum(gain >= GAIN for gain in gains),
                sum(gain < -LOSS for gain in gains),
                gains[len(gains) // 2],
                gains[0],
                _change(acts, "launches"),
                _change(acts, "bytes"),
            )
        )
    return sorted(rows, key=lambda row: (not row.acts, row.part, row.cluster))


def _change(acts: Sequence[Compared], field: str) -> float:
    before, after = (sum(getattr(figures, field) for figures in side) for side in (
        [item.without for item in acts], [item.with_it for item in acts]
    ))  # fmt: skip
    return after / before - 1 if before else 0.0


def markdown(rows: Sequence[Verdict]) -> str:
    """Return the table for the documents."""
    day = dt.datetime.now(tz=dt.UTC).date().isoformat()
    head = f"Made by `python -m evaluation ablation` on {day}.\n\n"
    head += "| part | devices | matches | acts | gains 10 % | loses 2 % | median | worst | launches | bytes | rule |\n"
    lines = [head + "|" + " --- |" * 11]
    for row in rows:
        cells = [row.part, row.cluster, row.matched, row.acts]
        if row.acts:
            changes = [f"{value:+.1%}" for value in (row.median, row.worst, row.launches, row.bytes)]
            cells += [row.gains, row.loses, *changes, "on" if row.by_default else "off"]
        else:
            cells += [""] * 7
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def main() -> None:
    """Compare and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models", default="", help="names of models of the zoo, separated by commas; leaves out the scenarios"
    )
    parser.add_argument("--every", type=int, default=1, help="use only every N-th model")
    parser.add_argument("--run", action="store_true", help="also run each model on which a part acts")
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    options = parser.parse_args()
    logging.getLogger("djinn.stages").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    models = [name for name in options.models.split(",") if name]
    if unknown := set(models) - ZOO.keys():
        parser.error(f"not in the zoo: {', '.join(sorted(unknown))}")
    plugins = planning_plugins(plugin_settings=ON)
    programs = cases(models or list(ZOO)[:: options.every], scenarios=not models)
    results = [item for case in programs for item in compare(case, plugins)]
    rows = verdicts(results)
    print(markdown(rows))
    report: dict[str, object] = {
        "verdicts": [attrs.asdict(row) | {"by_default": row.by_default} for row in rows],
        "programs": [attrs.asdict(item) for item in results if item.acts],
    }
    if options.run:
        real_counts = runs(acting(plugins, [(item.case, item.part) for item in results if item.acts]))
        print(effect_table(real_counts))
        report["runs"] = {
            where: {plugin: {model: attrs.asdict(item) for model, item in by.items()} for plugin, by in ways.items()}
            for where, ways in real_counts.items()
        }
    if options.json:
        print(json.dumps(report))


if __name__ == "__main__":
    main()
