"""Executors on Ray against executors of a server, both under TLS on this machine.

    python -m evaluation bench-ray [--json] [--quick] [--case small]

`small`: the smallest blocking submission, divided by the same with a server's executor over tcps. `start`: from the
first use of the device to the first value, with Ray connected; the reference is a local executor. `start_prepared`: the
same if the node keeps a process to fork executors from (`plugins.ray.prepared_seconds`). `start_over_actor`: this time
divided by that of an empty Ray actor, from its placement group to its first reply.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

import djinn
from evaluation.benchmarks.measuring import Case, Effort, Outcome, main, median_of
from evaluation.served import served

REMOTE = "remote_accelerator:0"
CALLS = 400
STORE_BYTES = 80 << 20


@contextmanager
def cluster() -> Iterator[str]:
    """Run a Ray cluster of a head and a node. Yield its address."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    import ray
    from ray.cluster_utils import Cluster

    common = {"object_store_memory": STORE_BYTES, "include_dashboard": False}
    found = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **common})
    found.add_node(num_cpus=2, object_store_memory=STORE_BYTES)
    ray.init(address=found.address, log_to_driver=False, logging_level="ERROR")
    try:
        yield found.address
    finally:
        djinn.shut_down()
        ray.shutdown()
        found.shutdown()


@contextmanager
def session(**settings: object) -> Iterator[None]:
    """Open a session with these settings."""
    djinn.shut_down()
    djinn.configure()
    djinn.configure(threads=1, start_timeout=200, **settings)
    try:
        yield
    finally:
        djinn.shut_down()


def seconds_of_small(effort: Effort) -> float:
    x = torch.ones(4, device=REMOTE)

    def step() -> None:
        (x * 2).sum().item()

    for _ in range(50):
        step()
    return median_of(step, effort.times(CALLS))


def in_turns(ours: Callable[[], float], reference: Callable[[], float], effort: Effort) -> Outcome:
    found: list[tuple[float, float]] = []
    for turn in range(effort.rounds):
        first = reference() if turn % 2 else 0.0
        mine = ours()
        found.append((mine, first or reference()))
    ratio = statistics.median(mine / theirs for mine, theirs in found)
    mine, theirs = (statistics.median(times) * 1e3 for times in zip(*found, strict=True))
    return Outcome(ratio, {"reference ms": theirs, "ours ms": mine})


def small(effort: Effort) -> Outcome:
    with cluster() as address, served("--tls-self-signed", "--store-gib", "0", threads=effort.threads) as serving:

        def by_ray() -> float:
            with session(engine="ray", engine_address=address):
                return seconds_of_small(effort)

        def by_tcps() -> float:
            where = {"servers": [serving.urls["tcps"]], "token": serving.token}
            with session(**where, tls_fingerprints=serving.fingerprint, disable=("local",)):
                return seconds_of_small(effort)

        return in_turns(by_ray, by_tcps, effort)


class Nothing:
    """An empty actor, to measure Ray's start time."""

    def ready(self) -> bool:
        return True


def seconds_of_actor() -> float:
    """Return the seconds from the placement group of an actor to its first reply. The caller is connected to the cluster."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    began = time.perf_counter()
    group = ray.util.placement_group([{"CPU": 1.0}])
    placed = PlacementGroupSchedulingStrategy(group, 0)
    actor = ray.remote(Nothing).options(num_cpus=1, scheduling_strategy=placed).remote()
    ray.get(actor.ready.remote())
    found = time.perf_counter() - began
    ray.kill(actor)
    ray.util.remove_placement_group(group)
    return found


def start(effort: Effort, prepared_seconds: float = 0.0, over_actor: bool = False) -> Outcome:
    def first_value() -> float:
        began = time.perf_counter()
        torch.ones(4, device=REMOTE).sum().item()
        return time.perf_counter() - began

    with cluster() as address:

        def by_ray() -> float:
            settings = {"ray": {"prepared_seconds": prepared_seconds}}
            with session(engine="ray", engine_address=address, plugin_settings=settings):
                return first_value()

        def here() -> float:
            with session():
                return first_value()

        by_ray()  # afterwards Ray has processes of this Python
        if prepared_seconds:
            wait_prepared()
        return in_turns(by_ray, seconds_of_actor if over_actor else here, effort)


def wait_prepared() -> None:
    """Wait until this machine has a process to fork executors from."""
    folder = Path(tempfile.gettempdir()) / f"djinn-launched-{os.geteuid()}"
    deadline = time.monotonic() + 120
    while not any(path.is_socket() for path in folder.glob("prepared-*")):
        assert time.monotonic() < deadline, "no process to fork executors from"
        time.sleep(0.1)


CASES = [
    Case("small", 1.1, small),
    Case("start", None, start),
    Case("start_prepared", None, partial(start, prepared_seconds=60.0)),
    Case("start_over_actor", None, partial(start, prepared_seconds=60.0, over_actor=True)),
]

if __name__ == "__main__":
    main("Executors that Ray holds", CASES)
