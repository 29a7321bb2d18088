"""Models of the zoo on real executors, with and without each plugin: counters of the client and of `fakegpu` per step."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
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
from evaluation.zoo.likeness import loss_of, moved

ENVIRONMENTS = ("one", "two", "fakegpu")
MODELS = ("gpt2", "llama", "clip", "resnet")
REMOTE = "remote_accelerator:0"
WARM, STEPS = 4, 2
SENT, RECEIVED = ("bytes_sent", "bytes_uploaded", "bytes_read"), ("bytes_received",)


@attrs.frozen
class Counted:
    """Counters of one steady step. Launches and microseconds are those of `fakegpu`, 0 elsewhere; seconds are wall time."""

    round_trips: float
    messages: float
    bytes: float
    peer_bytes: float
    launches: float
    device_us: float
    seconds: float


@contextmanager
def session(where: str, disabled: Sequence[str]) -> Iterator[None]:
    """Connect to one executor, two executors, or one on `fakegpu`."""
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
    """Return all counters."""
    found, figures = djinn.stats(), executor_figures()
    return {
        "round_trips": found["round_trips"],
        "messages": found["messages_sent"] + found["messages_received"],
        "bytes": sum(found[name] for name in (*SENT, *RECEIVED)),
        "peer_bytes": figures.get("peer_bytes", 0),
        "launches": figures.get("device_launches", 0),
        "device_us": figures.get("device_clock_ns", 0) / 1e3,
        "seconds": time.perf_counter(),
    }


def counted(name: str) -> Counted:
    """Run a model until its plan is cached, then count a step."""
    torch.manual_seed(0)
    model, inputs = ZOO[name].make()
    ours, given = model.eval().to(REMOTE), moved(inputs, REMOTE)

    @torch.no_grad()
    def step() -> None:
        loss_of(ours(**given)).item()

    for _ in range(WARM):
        step()
    djinn.synchronize()
    before = counters()
    asking = {
        key: value - before[key] for key, value in counters().items()
    }  # subtract the cost of reading the counters
    before = counters()
    for _ in range(STEPS):
        step()
    after = counters()
    return Counted(**{key: max(0.0, after[key] - before[key] - asking[key]) / STEPS for key in before})


def runs(registry: Registry, models: Sequence[str], parts: Collection[str]) -> dict[str, dict[str, dict[str, Counted]]]:
    """Return the counters by environment, model and disabled plugin ("" for none).

    `parts`: patterns and optimizations whose plugins are disabled.
    """
    plugins = {row.name for (_, name), row in registry.owners.items() if name in parts}
    found: dict[str, dict[str, dict[str, Counted]]] = {w: {m: {} for m in models} for w in ENVIRONMENTS}
    for where in ENVIRONMENTS:
        for plugin in ("", *sorted(plugins)):
            with session(where, [plugin] if plugin else []):
                for model in models:
                    found[where][model][plugin] = counted(model)
    return found


def differing(found: dict[str, dict[str, dict[str, Counted]]], seconds: bool) -> str:
    """Return a table of the steps whose counters change without a plugin."""
    fields = [field.name for field in attrs.fields(Counted) if seconds or field.name != "seconds"]
    lines = ["| where | model | without | " + " | ".join(fields) + " |", "|" + " --- |" * (3 + len(fields))]
    for where, models in found.items():
        for model, ways in models.items():
            for plugin, figures in ways.items():
                if not plugin or any(getattr(figures, f) != getattr(ways[""], f) for f in fields if f != "seconds"):
                    cells = [f"{getattr(figures, field):,.6g}" for field in fields]
                    lines.append(f"| {where} | {model} | {plugin or '(nothing)'} | " + " | ".join(cells) + " |")
    return "\n".join(lines)
