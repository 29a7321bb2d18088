"""Run models of the zoo on real executors with and without each plugin, and count costs of a step."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import attrs
import torch

import djinn
from djinn.testing import executor_figures
from djinn_core.registry.registry import Registry
from evaluation.fakegpu.run_fakegpu import serving
from evaluation.zoo.catalogue import ZOO
from evaluation.zoo.likeness import move_inputs, tensors

ENVIRONMENTS = ("one", "two", "fakegpu")
REMOTE = "remote_accelerator:0"
WARM, STEPS = 4, 2
SENT, RECEIVED = ("bytes_sent", "bytes_uploaded", "bytes_read"), ("bytes_received",)


@attrs.frozen
class StepCounts:
    """Counters of one step after the plan is cached.

    Launches and device time are those of `fakegpu`, and 0 on other devices. `seconds` is wall time.
    """

    round_trips: float
    messages: float
    bytes: float
    peer_bytes: float
    launches: float
    device_us: float
    seconds: float


Runs = dict[str, dict[str, dict[str, StepCounts]]]


@contextmanager
def session(where: str, disabled: Sequence[str]) -> Iterator[None]:
    """Connect to the executors of `where`: two, one on `fakegpu`, or one. `disabled`: plugins that are off."""
    settings: dict[str, Any] = {"exact": False, "disable": ("adaptive", *disabled)}
    settings["plugin_settings"] = {} if "cleanup" in disabled else {"cleanup": {"on": True}}
    with ExitStack() as stack:
        djinn.shut_down()
        if where == "fakegpu":
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="djinn-ablation-")))
            server = stack.enter_context(
                serving(folder, {**os.environ, "XDG_CACHE_HOME": str(folder), "DJINN_START_TIMEOUT": "300"})
            )
            settings |= {"servers": [server.url("tcp")], "token": server.token}
            settings["disable"] += ("local",)
        else:
            settings |= {"executors": 1 + (where == "two"), "threads": 1}
        djinn.configure(**settings)
        try:
            djinn.init()
            yield
        finally:
            djinn.shut_down()
            djinn.configure()


def counters() -> dict[str, float]:
    """Return the counters of the client and of its executors, by name."""
    result, figures = djinn.stats(), executor_figures()
    return {
        "round_trips": result["round_trips"],
        "messages": result["messages_sent"] + result["messages_received"],
        "bytes": sum(result[name] for name in (*SENT, *RECEIVED)),
        "peer_bytes": figures.get("peer_bytes", 0),
        "launches": figures.get("device_launches", 0),
        "device_us": figures.get("device_clock_ns", 0) / 1e3,
    }


def count_step(name: str) -> StepCounts:
    """Run a model until its plan is cached, then count a step."""
    torch.manual_seed(0)
    model, inputs = ZOO[name].make()
    ours, input_tensor = model.eval().to(REMOTE), move_inputs(inputs, REMOTE)

    @torch.no_grad()
    def step() -> None:
        next(output for _, output in tensors(ours(**input_tensor)) if output.is_floating_point()).mean().item()

    for _ in range(WARM):
        step()
    djinn.synchronize()
    before = counters()
    asking = {key: value - before[key] for key, value in counters().items()}  # the cost of reading the counters
    before = counters()
    start = time.perf_counter()
    for _ in range(STEPS):
        step()
    seconds = (time.perf_counter() - start) / STEPS
    after = counters()
    counts = {key: max(0.0, after[key] - before[key] - asking[key]) / STEPS for key in before}
    return StepCounts(**counts, seconds=seconds)


def acting(registry: Registry, compared: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Return by plugin the models of the zoo on which one of its patterns or optimizations acts.

    `compared`: pairs of a program and the name of a part that acts on it.
    """
    owner = {name: row.name for (_, name), row in registry.owners.items()}
    results: dict[str, dict[str, None]] = {}
    for program, part in compared:
        if (model := program.removesuffix(", training")) in ZOO:
            results.setdefault(owner[part], {})[model] = None
    return {plugin: list(models) for plugin, models in sorted(results.items())}


def runs(acts: Mapping[str, Sequence[str]]) -> Runs:
    """Return the counters of a step, by environment, by disabled plugin ("" for none), and by model.

    `acts`: models by plugin. Each model runs with and without the plugin. Models that fail are left out.
    """
    every = list(dict.fromkeys(model for models in acts.values() for model in models))
    results: Runs = {}
    for where in ENVIRONMENTS:
        for plugin, models in {"": every, **acts}.items():
            with session(where, [plugin] if plugin else []):
                results.setdefault(where, {})[plugin] = steps = {}
                for model in models:
                    try:
                        steps[model] = count_step(model)
                    except (djinn.DjinnError, RuntimeError, ValueError, TypeError) as error:
                        print(f"{where}, without {plugin or 'nothing'}: {model}: {error}"[:160], file=sys.stderr)
    return results


def effect_table(found: Runs) -> str:
    """Return a table of the changes that each plugin makes to a step of the models on which it acts.

    On `fakegpu`, the time is the device's, whose clock depends only on the ops.
    """
    fields = [field.name for field in attrs.fields(StepCounts) if field.name != "seconds"]
    head = ("plugin", "where", "models", "differ", "saves 10 %", "costs 2 %", *fields)
    lines = [f"| {' | '.join(head)} |", "|" + " --- |" * len(head)]
    for where, ways in found.items():
        for plugin in ways.keys() - {""}:
            pairs = [(ways[""][model], one) for model, one in ways[plugin].items() if model in ways[""]]
            differ = [pair for pair in pairs if any(getattr(pair[0], f) != getattr(pair[1], f) for f in fields)]
            gains = [1 - with_it.device_us / without.device_us for with_it, without in differ if without.device_us]
            counts = [len(pairs), len(differ), sum(g >= 0.1 for g in gains), sum(g < -0.02 for g in gains)]
            lines.append(
                f"| {plugin} | {where} | {' | '.join(map(str, counts))} | {' | '.join(_changes(differ, fields))} |"
            )
    return "\n".join((*lines[:2], *sorted(lines[2:])))


def _changes(pairs: Sequence[tuple[StepCounts, StepCounts]], fields: Sequence[str]) -> Iterator[str]:
    """Yield the relative change of each figure, summed over all models, if the plugin is on."""
    for field in fields:
        on, off = (sum(getattr(pair[side], field) for pair in pairs) for side in (0, 1))
        yield f"{on / off - 1:+.1%}" if off else f"+{on:,.0f}" if on else ""
