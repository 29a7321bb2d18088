"""A client with 10, 100 and 1,000 simulated executors: its processor time, memory and planning time.

    python -m evaluation thousand [--json] [--sizes 10,100,1000] [--repeat 3]

All executors but one are stand-ins (`stand_ins.py`): another process answers the client, without tensors. They are
launched, connected and tracked like executors of a cluster, over local sockets. The first is a real executor, which
runs programs and is killed. Times are the client's processor time (user and system), medians of `--repeat` processes
per size. Prints a table, and with --json one object on the last line.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import attrs

from djinn_server.hookspecs.executors import ExecutorEngine
from evaluation.load.stand_ins import StandIn, allow_many_sockets, stand_ins

SIZES = (10, 100, 1000)
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "torch_dtype": "bfloat16",
}
ROWS = {
    "connect_s": "to connect, CPU s",
    "connect_ms_each": "for each executor, CPU ms",
    "memory_mib": "memory, MiB",
    "memory_kib_each": "for each executor, KiB",
    "step_ms": "a step of a program on one of them, CPU ms",
    "asking_ms": "a question to all of them (memory), CPU ms",
    "answers_a_second": "answers to it, for each CPU s",
    "heartbeats_a_second": "status reports, for each CPU s",
    "join_ms": "one more joins, CPU ms",
    "leave_ms": "one leaves, CPU ms",
    "death_s": "an executor's death until it has recovered, CPU s",
    "death_wall_s": "the same on the clock, s",
    "plan_s": "to plan 80 layers of 70B, CPU s",
}


def spent(action: Callable[[], object]) -> float:
    """Return the processor seconds of this process for an action."""
    before = time.process_time()
    action()
    return time.process_time() - before


def memory() -> int:
    """Return the resident bytes of this process."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


class MixedEngine(ExecutorEngine):
    """The engine `stand-ins`: the first executor is a local process, all others are stand-ins."""

    name = "stand-ins"

    def __init__(self, url: str, journals: Path) -> None:
        self._url, self._journals = url, journals

    def launch(self, options: Any, request: Any) -> Any:
        """As `ExecutorEngine.launch`."""
        from djinn_server.launch.engines import LocalEngine

        if request.number:
            return StandIn(self._url, request.number)
        recovery = attrs.evolve(options.recovery, journals=self._journals, journal_limit=1 << 30)
        return LocalEngine().launch(attrs.evolve(options, recovery=recovery), request)


def measured(count: int) -> dict[str, float]:
    """Return all figures of a client with `count` executors, measured in this process."""
    allow_many_sockets()
    with tempfile.TemporaryDirectory() as folder, stand_ins(Path(folder)) as url:
        journals = Path(folder) / "journals"
        journals.mkdir(mode=0o700)
        return {**_of_a_pool(count, MixedEngine(url, journals)), "plan_s": planning(count)}


def _of_a_pool(count: int, engine: MixedEngine) -> dict[str, float]:
    import torch

    import djinn
    from djinn.hooks import hookimpl
    from djinn.testing import open_connections

    def djinn_register_executors(settings: object) -> list[MixedEngine]:
        del settings
        return [engine]

    plugin = ModuleType("stand_ins")
    plugin.djinn_api_version = "2.0"
    plugin.djinn_register_executors = hookimpl(djinn_register_executors)
    settings = {"engine": "stand-ins", "threads": 1, "placement_policy": "single", "calibrate": False}
    djinn.configure(plugins=["pool", plugin], executors=count, **settings)
    torch.ones(1, device="remote_accelerator:0")  # the cost of the first op does not belong to the executors
    before = memory()
    connect = spent(djinn.init)
    held = memory() - before
    weight = torch.eye(8).to("remote_accelerator:0")

    def step() -> float:
        return float((weight @ weight).sum().item())

    assert [step() for _ in range(5)] == [8.0] * 5
    steps = statistics.median(spent(step) for _ in range(9))
    asking = statistics.median(spent(torch.remote_accelerator.memory_allocated) for _ in range(5))
    launched = [one.executor for one in open_connections()]
    beats = [one._process for one in launched[1:]]
    heartbeats = spent(lambda: [one.status() for one in beats])
    join = spent(lambda: djinn.scale(executors=count + 1))
    leave = spent(lambda: djinn.scale(executors=count))
    death, wall = _death(step)
    djinn.shut_down()
    return {
        "executors": count,
        "connect_s": connect,
        "connect_ms_each": connect / count * 1e3,
        "memory_mib": held / 2**20,
        "memory_kib_each": held / count / 2**10,
        "step_ms": steps * 1e3,
        "asking_ms": asking * 1e3,
        "answers_a_second": count / asking,
        "heartbeats_a_second": len(beats) / heartbeats,
        "join_ms": join * 1e3,
        "leave_ms": leave * 1e3,
        "death_s": death,
        "death_wall_s": wall,
    }


def _death(step: Callable[[], float]) -> tuple[float, float]:
    """Return the processor time and the elapsed time until a program continues after its executor was killed."""
    from djinn.testing import executor_processes

    os.kill(executor_processes()[0], signal.SIGKILL)
    began = time.monotonic()
    seconds = spent(lambda: _goes_on(step))
    assert not [one for one in threading.enumerate() if one.name == "djinn-peer-reconnection" and one.is_alive()]
    return seconds, time.monotonic() - began


def _goes_on(step: Callable[[], float]) -> None:
    assert step() == 8.0
    for one in threading.enumerate():
        if one.name == "djinn-peer-reconnection":
            one.join()


def planning(count: int) -> float:
    """Processor seconds to plan one token of a 70B model on `count` devices of 80 GiB."""
    from djinn_client.runtime.plugins import open_plugins
    from djinn_commands.planning.model import captured_model, step_of
    from djinn_core.planning.pipeline import plan
    from djinn_core.planning.request import Request, preferred
    from djinn_profiler.plans.cluster import read_cluster

    machines = f"count = {count // 10}\ndevices = 10\nmemory_gib = 80\ntflops = 300\ngbs = 2000"
    topology = read_cluster(
        f'network = {{ gbs = 12 }}\n[[machines]]\nname = "node"\nlink = {{ gbs = 300 }}\n{machines}\n'
    )
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
        step = step_of("decode", 1, 512)
        captured = captured_model(str(Path(folder) / "config.json"), step, "annotate")
    registry = open_plugins()
    policy, scheduler = preferred(registry.placement_policies, "single"), preferred(registry.schedulers, "sequential")
    request = Request(topology, placement_policy=policy, scheduler=scheduler)
    program: Any = captured.graph
    return spent(lambda: plan(program, registry, request, profile=captured.profile))


def main() -> None:
    """Measure each size in separate processes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)))
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measured(options.one)))
        return
    sizes = [int(size) for size in options.sizes.split(",")]
    found = {size: _median([_in_a_process(size) for _ in range(options.repeat)]) for size in sizes}
    print(f"{'executors':52}" + "".join(f"{size:>12,}" for size in sizes))
    for name, title in ROWS.items():
        print(f"{title:52}" + "".join(f"{found[size][name]:>12,.2f}" for size in sizes))
    if options.json:
        print(json.dumps({f"thousand_{size}_{name}": found[size][name] for size in sizes for name in ROWS}))


def _in_a_process(size: int) -> dict[str, float]:
    command = [sys.executable, "-W", "ignore", "-m", "evaluation.load.thousand", "--one", str(size)]
    lines = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()
    found: dict[str, float] = json.loads(lines[-1])
    return found


def _median(runs: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


if __name__ == "__main__":
    main()
