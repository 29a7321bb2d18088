"""Kill executors and break networks under real programs, and compare results with undisturbed runs.

    python -m evaluation chaos [--kills 100] [--seed 0] [--quick] [--only ROW ...] [--json]

Each row disturbs each program of `programs.PROGRAMS` at a uniformly random moment, and compares results, hashes of all
tensors and the random state with an undisturbed run. Rows kill: the executor of a server; one of two executors that
exchange values, or both, of one server and of two; a program's own executors, also without journals, and while
executors join and leave; a server with its executor while another server stands by; the gateway, which is restarted,
alone, with its executor, and with two executors. Other rows kill an executor whose program gets Ctrl-C, becomes a graph,
saves checkpoints or moves an idle session to disk, and lose frames and connections through a relay. Prints a table, and with --json one object on the last
line.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import random
import signal
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

import djinn
from djinn.testing import executor_figures
from djinn_core.system.interrupts import raise_outside_torch
from djinn_fakegpu.remote_control import RemoteControl
from evaluation.chaos import files
from evaluation.chaos.bad_network import HALF, LOSE, PASS, BadNetwork
from evaluation.chaos.disturbing import (
    EXCHANGING,
    an_executor,
    an_executor_of_its_own,
    disturb,
    one_server,
    pair,
    restartable,
    two_devices,
    two_servers,
    using,
)
from evaluation.chaos.programs import PROGRAMS, REMOTE, Program, interrupted, switch
from evaluation.served import Server

FRAMES_BETWEEN = 48  # frames of 4 MiB between resets: three chunks of 64 MiB


def disturb_all(
    prefix: str,
    kills: int,
    chance: random.Random,
    choose: Callable[[random.Random], Callable[[], object]],
    programs: Mapping[str, Program] = PROGRAMS,
    at: Callable[[int], object] = lambda _: None,
) -> dict[str, float]:
    """Disturb programs `kills` times in total. Print and return the outcomes, under names that begin with `prefix`.

    `choose`: returns the disturbance of a run. `at`: called with the number of each step of a program.
    """
    report: dict[str, float] = {}
    for number, (name, program) in enumerate(programs.items()):
        share = (kills + len(programs) - 1 - number) // len(programs)
        if share:
            tally = disturb(functools.partial(program, at), share, chance, choose)
            print(f"{prefix + name:18} {tally}", flush=True)
            report |= {f"{prefix}{name}_{key}": value for key, value in tally.figures().items()}
    return report


def updates(server: Server, count: int) -> dict[str, float]:
    """Return figures of in-place additions over a network that loses every seventh frame and stalls for five seconds."""
    network = BadNetwork(server.tcp)
    with using(servers=[network.url], token=server.token, disable=("local",)):
        total, one = torch.zeros(1, dtype=torch.float64, device=REMOTE), torch.ones(1, dtype=torch.float64).to(REMOTE)
        network.up = network.down = lambda n: LOSE if n % 7 == 0 else PASS
        start = time.monotonic()
        for i in range(count):
            total.add_(one)
            if i == count // 2:
                network.part(5.0)
            if i % 10 == 0:
                djinn.synchronize()
        result = total.item()
        seconds = time.monotonic() - start
        network.up = network.down = lambda _: PASS
    network.close()
    return {"updates": count, "updates_wrong": float(result != count), "updates_s": round(seconds, 2)}


def upload(server: Server, nbytes: int) -> dict[str, float]:
    """Return figures of an upload over a connection that is reset in every third chunk, such as bytes sent per byte."""
    network = BadNetwork(server.tcp)
    with using(servers=[network.url], token=server.token, disable=("local",)):
        source = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)  # incompressible
        network.sent = 0
        network.up = lambda n: HALF if n % FRAMES_BETWEEN == 0 else PASS
        references = source.to(REMOTE)
        djinn.synchronize()
        sent_bytes, resets = network.sent, network.connections - 1
        network.up = lambda _: PASS
        equal = torch.equal(references.cpu(), source)
    network.close()
    return {
        "upload_bytes_ratio": round(sent_bytes / nbytes, 4),
        "upload_resets": resets,
        "upload_wrong": float(not equal),
    }


Options = argparse.Namespace
Row = Callable[[Options, random.Random, Path], dict[str, float]]


def one_executor(options: Options, chance: random.Random, folder: Path) -> dict[str, float]:
    """Kill the executor of a server, `options.kills` times."""
    with one_server(folder):
        return disturb_all("", options.kills, chance, an_executor)


def two_executors(options: Options, chance: random.Random, folder: Path) -> dict[str, float]:
    """Kill one of two executors that exchange values, or both."""
    with two_devices(folder / "one"):
        report = disturb_all("devices_", (options.kills + 1) // 2, chance, an_executor)
    with two_servers(folder / "two"):
        return report | disturb_all("servers_", (options.kills + 1) // 2, chance, an_executor)


def own_executor(options: Options, chance: random.Random, _: Path) -> dict[str, float]:
    """Kill this program's own executor."""
    with using():
        return disturb_all("own_", (options.kills + 1) // 2, chance, an_executor_of_its_own)


def own_pool(options: Options, chance: random.Random, _: Path) -> dict[str, float]:
    """Kill one of two executors without journals, or both. The client's log recovers them."""
    with using(executors=2, placement_policy="round_robin", recover=False, standby=["engine"]):
        return disturb_all("standby_", (options.kills + 1) // 2, chance, an_executor_of_its_own)


def scaled(options: Options, chance: random.Random, _: Path) -> dict[str, float]:
    """Let executors join and leave during training, and kill one of them, or all."""
    changes = {7: 3, 17: 1, 27: 2}
    with using(executors=2, placement_policy="round_robin"):
        scale = lambda step: step in changes and djinn.scale(executors=changes[step])
        return disturb_all(
            "scaled_", (options.kills + 1) // 2, chance, an_executor_of_its_own, {"train": PROGRAMS["train"]}, scale
        )


def another_server(options: Options, chance: random.Random, folder: Path) -> dict[str, float]:
    """Kill a server with its executor while another server stands by."""
    with pair(folder) as servers:
        return disturb_all("failover_", (options.kills + 1) // 2, chance, servers.the_one_in_use)


def _while_writing(name: str, options: Options, chance: random.Random, folder: Path, *flags: str) -> dict[str, float]:
    """Kill the executor at random moments of a program of `files.PROGRAMS`, in which it writes files."""
    (folder / "saved").mkdir()
    kept = ("--save-weights", str(folder / "saved"), "--lease-seconds", "1200", *flags)
    with one_server(folder, *kept), contextlib.chdir(folder):  # folder of pointer files
        result = files.FileKills(folder)
        tally = disturb(files.PROGRAMS[name], options.kills, chance, result.executor)
        result.check_files()
    print(f"{name:18} {tally}; {result}", flush=True)
    return {f"{name}_{key}": float(value) for key, value in (tally.figures() | result.figures()).items()}


def saves(options: Options, chance: random.Random, folder: Path) -> dict[str, float]:
    """Kill the executor while it saves checkpoints."""
    return _while_writing("save", options, chance, folder)


def moves(options: Options, chance: random.Random, folder: Path) -> dict[str, float]:
    """Kill the executor while it moves an idle session to disk and back."""
    return _while_writing("move", options, chance, folder, "--idle-minutes", "0.005")


def interrupts(options: Options, chance: random.Random, folder: Path) -> dict[str, float]:
    """Kill the executor of a program whose work is interrupted by Ctrl-C in each step."""
    before = signal.signal(signal.SIGINT, raise_outside_torch)
    try:
        with one_server(folder):
            return disturb_all("ctrl_c_", (options.kills + 4) // 5, chance, an_executor, {"train": interrupted})
    finally:
        signal.signal(signal.SIGINT, before)


def switches(options: Options, chance: random.Random, folder: Path) -> dict[str, float]:
    """Kill the executor of programs that become graphs of an accelerator."""
    device = RemoteControl(folder)

    def slow_launches(run: int) -> None:
        """Make launches so slow on the device's simulated clock that a program is hot after few runs."""
        if run % 4 == 0:
            with contextlib.suppress(ConnectionError):  # it was killed during the call
                device.configure(launch=0.1)

    kills = (options.kills + 4) // 5
    with one_server(folder, "--graphs", device="fakegpu"):
        report = disturb_all("switch_", kills, chance, an_executor, {"graphs": switch}, slow_launches)
        switch(slow_launches)
        report["switch_graph_launches"] = executor_figures().get("device_graph_launches", 0)
    print(f"graphs were launched {report['switch_graph_launches']} times in a further run")
    return report


def networks(options: Options, _: random.Random, folder: Path) -> dict[str, float]:
    """Use networks that lose frames and reset connections."""
    with one_server(folder) as server:
        report = updates(server, 1000 if options.quick else 10_000)
        report |= upload(server, (256 if options.quick else 1024) << 20)
    print(f"updates    {report['updates']} in place, every seventh frame lost, 5 s of nothing: {report['updates_s']} s")
    print(f"upload     {report['upload_resets']} resets: {report['upload_bytes_ratio']} times the bytes")
    return report


def restarted(options: Options, chance: random.Random, folder: Path) -> dict[str, float]:
    """Kill and restart the gateway."""
    with restartable(folder) as server:
        return disturb_all("restart_", (options.kills + 1) // 2, chance, server.gateway)


def restarted_both(options: Options, chance: random.Random, folder: Path) -> dict[str, float]:
    """Kill the gateway and the executor at the same time, and restart the gateway."""
    with restartable(folder) as server:
        return disturb_all("restart_both_", (options.kills + 4) // 5, chance, server.gateway_and_executors)


def restarted_pool(options: Options, chance: random.Random, folder: Path) -> dict[str, float]:
    """Kill and restart the gateway of two executors that exchange values."""
    with restartable(folder, "--device", "all", **EXCHANGING) as server:
        return disturb_all("restart_pool_", (options.kills + 9) // 10, chance, server.gateway)


ROWS: dict[str, Row] = {
    "executor": one_executor,
    "pools": two_executors,
    "own": own_executor,
    "failover": another_server,
    "standby": own_pool,
    "scaled": scaled,
    "interrupts": interrupts,
    "switches": switches,
    "saves": saves,
    "moves": moves,
    "restarts": restarted,
    "restarts_both": restarted_both,
    "restarts_pool": restarted_pool,
    "networks": networks,
}


def main() -> None:
    """Run the requested rows, and print the outcomes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="fewer updates and bytes")
    parser.add_argument("--only", choices=ROWS, nargs="+", default=list(ROWS), help="some rows only")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    chance = random.Random(options.seed)
    torch.set_num_threads(1)
    report: dict[str, float] = {}
    for name in options.only:
        with tempfile.TemporaryDirectory() as folder:
            report |= ROWS[name](options, chance, Path(folder))
    if options.json:
        print(json.dumps(report))


if __name__ == "__main__":
    main()
