"""Kills executors and breaks networks under real programs, and compares results with undisturbed runs.

    python -m evaluation chaos [--kills 100] [--seed 0] [--quick] [--only ROW ...] [--json]

One server with one executor, then two executors that exchange values: two devices of one server, and two servers. Each run of a program is
disturbed by one SIGKILL, of either executor or of both, at a moment drawn evenly over its duration. Then the same with an executor that this
program starts for itself, and with two servers of which one is killed with its executor and the other one stands by; with two executors of its own
and no journals, whose log brings them back; with executors that join and leave meanwhile; while checkpoints are
saved and an idle session is moved to disk. Then the gateway of a server is killed and started again (half as many kills), and gateway and
executor at once (a fifth), and the gateway of two executors that exchange values (a tenth); here hashes of all tensors and of the random state are compared. Then, over a relay: updates in place
while every seventh frame is lost in either direction and nothing passes for five seconds; and an upload whose
connection is reset in every third chunk of 64 MiB. A table, and with --json one object on the last line.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import attrs
import torch

import djinn
from djinn_client.runtime import client
from djinn_client.runtime.connecting.servers import ask_servers
from djinn_core.protocol.connection_file import read_connection_file
from evaluation.chaos import failover, files, pools, restarts
from evaluation.chaos.bad_network import HALF, LOSE, PASS, BadNetwork

REMOTE = "remote_accelerator:0"
START_SECONDS = 600  # on a busy machine
FRAMES_BETWEEN = 48  # of 4 MiB: three chunks of 64 MiB
Program = Callable[[], object]
Victims = Callable[[random.Random], list[int]]


@contextlib.contextmanager
def serving() -> Iterator[tuple[str, str]]:
    """A server of its own: its TCP address and token."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file = folder / "connection.json"
        command = [sys.executable, "-m", "djinn_core.cli", "serve", "--connection-file", str(file), "--device", "cpu"]
        command += ["--threads", "1", "--state-dir", str(folder / "state"), "--store", str(folder / "store")]
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
        deadline = time.monotonic() + START_SECONDS
        while not file.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError((folder / "log").read_text())
            time.sleep(0.05)
        found = read_connection_file(file)
        try:
            yield next(url for url in found.urls if url.startswith("tcp")), found.token
        finally:
            process.terminate()
            process.wait(START_SECONDS)


@contextlib.contextmanager
def using(url: str, token: str) -> Iterator[None]:
    """`remote_accelerator` is at that address."""
    djinn.shut_down()
    djinn.configure(servers=[url], token=token, disable=("local",), threads=1)
    djinn.init()
    try:
        yield
    finally:
        djinn.shut_down()
        djinn.configure()


def executor(_: random.Random) -> list[int]:
    """The process of the executor that is ready, waiting for one."""
    while True:
        (status,) = ask_servers(client.settings()).values()
        if not isinstance(status, Exception):
            ready = [one.process for one in status.executors if one.state == "ready"]
            if ready:
                return ready[:1]
        time.sleep(0.05)


def generation() -> Program:
    """Greedy decoding of a small Llama."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 500}
    model = LlamaForCausalLM(LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **sizes)).eval().to(REMOTE)
    prompt = torch.randint(0, 500, (1, 12)).to(REMOTE)
    return lambda: model.generate(prompt, max_new_tokens=40, do_sample=False, pad_token_id=0).tolist()


def training(before: Callable[[int], object] = lambda _: None) -> Program:
    """Losses of some steps with dropout, AdamW and updates in place; `before` is called with the number of each step."""
    x, y = torch.randn(64, 32), torch.randint(0, 4, (64,))

    def train() -> object:
        torch.manual_seed(5)
        layers = [torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(64, 4)]
        model = torch.nn.Sequential(*layers).to(REMOTE)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        given, wanted = x.to(REMOTE), y.to(REMOTE)
        losses = []
        for step in range(60):
            before(step)
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(given), wanted)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    return train


@attrs.define
class Tally:
    """Outcomes of the disturbed runs of a program."""

    kills: int = 0
    different: int = 0
    raised: int = 0
    recovery: list[float] = attrs.field(factory=list)


def disturb(program: Program, kills: int, chance: random.Random, victims: Victims) -> Tally:
    """Run a program so many times, at one moment of which the victims are killed."""
    program()  # so that what is timed is not the first run
    started = time.monotonic()
    expected = program()
    usual = time.monotonic() - started
    tally = Tally()
    for _ in range(kills):
        moment = chance.uniform(0.0, usual)
        killer = threading.Timer(moment, pools.kill, (victims(chance),))
        started = time.monotonic()
        killer.start()
        try:
            tally.different += program() != expected
        except Exception as error:
            tally.raised += 1
            traceback.print_exception(error)
        killer.join()
        tally.kills += 1
        tally.recovery.append(time.monotonic() - started - usual)
    return tally


def disturb_all(prefix: str, kills: int, chance: random.Random, victims: Victims) -> dict[str, float]:
    """Disturb each program so many times; what came of it, under names that begin with `prefix`."""
    return disturb_each({"generate": generation(), "train": training()}, prefix, kills, chance, victims)


def disturb_each(
    programs: Mapping[str, Program], prefix: str, kills: int, chance: random.Random, victims: Victims
) -> dict[str, float]:
    """As `disturb_all`, with some programs."""
    report: dict[str, float] = {}
    for name, program in programs.items():
        tally = disturb(program, kills, chance, victims)
        middle = statistics.median(tally.recovery)
        print(
            f"{prefix + name:18} {tally.kills} kills, {tally.different} results differed, {tally.raised} raised, "
            f"{middle:.1f} s longer than undisturbed (at most {max(tally.recovery):.1f})",
            flush=True,
        )
        report |= {f"{prefix}{name}_kills": tally.kills, f"{prefix}{name}_different": tally.different}
        report |= {f"{prefix}{name}_raised": tally.raised, f"{prefix}{name}_recovery_s": round(middle, 2)}
    return report


def updates(url: str, token: str, count: int) -> dict[str, float]:
    """Additions in place over a network that loses every seventh frame, and stops for five seconds; the sum must be exact."""
    network = BadNetwork(url)
    with using(network.url, token):
        total, one = torch.zeros(1, dtype=torch.float64, device=REMOTE), torch.ones(1, dtype=torch.float64).to(REMOTE)
        network.up = network.down = lambda n: LOSE if n % 7 == 0 else PASS
        started = time.monotonic()
        for i in range(count):
            total.add_(one)
            if i == count // 2:
                network.part(5.0)
            if i % 10 == 0:
                djinn.synchronize()
        found = total.item()
        seconds = time.monotonic() - started
        network.up = network.down = lambda _: PASS
    network.close()
    return {"updates": count, "updates_wrong": float(found != count), "updates_s": round(seconds, 2)}


def upload(url: str, token: str, nbytes: int) -> dict[str, float]:
    """An upload whose connection is reset in every third chunk: bytes that were sent over bytes that there are."""
    network = BadNetwork(url)
    with using(network.url, token):
        source = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)  # which nothing compresses
        network.sent = 0
        network.up = lambda n: HALF if n % FRAMES_BETWEEN == 0 else PASS
        held = source.to(REMOTE)
        djinn.synchronize()
        sent, resets = network.sent, network.connections - 1
        network.up = lambda _: PASS
        equal = torch.equal(held.cpu(), source)
    network.close()
    return {"upload_bytes_ratio": round(sent / nbytes, 4), "upload_resets": resets, "upload_wrong": float(not equal)}


Options = argparse.Namespace
Row = Callable[[Options, random.Random], dict[str, float]]


def one_executor(options: Options, chance: random.Random) -> dict[str, float]:
    """One executor of a server is killed."""
    with serving() as (url, token), using(url, token):
        return disturb_all("", (options.kills + 1) // 2, chance, executor)


def two_executors(options: Options, chance: random.Random) -> dict[str, float]:
    """One of two executors that exchange values is killed, or both."""
    report: dict[str, float] = {}
    for kind in pools.KINDS:
        with tempfile.TemporaryDirectory() as folder, pools.pool(kind, Path(folder)):
            report |= disturb_all(f"{kind}_", (options.kills + 3) // 4, chance, pools.victims)
    return report


def own_executor(options: Options, chance: random.Random) -> dict[str, float]:
    """The executor is killed that this program has started for itself."""
    with failover.own():
        return disturb_all("own_", (options.kills + 3) // 4, chance, failover.own_victims)


def own_pool(options: Options, chance: random.Random) -> dict[str, float]:
    """Of two executors without journals one is killed, or both; the log of this program brings them back."""
    settings = {"executors": 2, "placement_policy": "round_robin", "recover": False, "standby": ["engine"]}
    with failover.own(**settings):
        return disturb_all("standby_", (options.kills + 3) // 4, chance, failover.some_of_own)


def scaled(options: Options, chance: random.Random) -> dict[str, float]:
    """Executors join and leave during training, and one of them is killed, or all."""
    with failover.own(executors=2, placement_policy="round_robin"):
        changes = {10: 3, 25: 1, 40: 2}
        return disturb_each(
            {"train": training(lambda step: step in changes and djinn.scale(executors=changes[step]))},
            "scaled_",
            (options.kills + 1) // 2,
            chance,
            failover.some_of_own,
        )


def while_writing(name: str, options: Options, chance: random.Random, *flags: str) -> dict[str, float]:
    """Kill the executor at random moments of a program of `files.PROGRAMS`, which has it write files."""
    with tempfile.TemporaryDirectory() as folder, files.serving(Path(folder), *flags):
        tally = files.disturb(files.PROGRAMS[name], options.kills, chance, executor, Path(folder))
    print(f"{name:18} {tally}", flush=True)
    return {f"{name}_{key}": float(value) for key, value in tally.figures().items()}


def saves(options: Options, chance: random.Random) -> dict[str, float]:
    """The executor is killed while it saves checkpoints."""
    return while_writing("save", options, chance)


def moves(options: Options, chance: random.Random) -> dict[str, float]:
    """The executor is killed while it moves an idle session to disk, and back."""
    return while_writing("move", options, chance, "--idle-minutes", "0.005")


def another_server(options: Options, chance: random.Random) -> dict[str, float]:
    """A server is killed with its executor; another one stands by."""
    with tempfile.TemporaryDirectory() as folder, failover.pair(Path(folder)) as pair:
        return disturb_all("failover_", (options.kills + 3) // 4, chance, pair.victims)


def networks(options: Options, _: random.Random) -> dict[str, float]:
    """Networks that lose frames and reset connections."""
    with serving() as (url, token):
        report = updates(url, token, 1000 if options.quick else 10_000)
        report |= upload(url, token, (256 if options.quick else 1024) << 20)
    print(f"updates    {report['updates']} in place, every seventh frame lost, 5 s of nothing: {report['updates_s']} s")
    print(f"upload     {report['upload_resets']} resets: {report['upload_bytes_ratio']} times the bytes")
    return report


def _restarted(
    prefix: str, chance: random.Random, kills: int, *flags: str, both: bool, **settings: object
) -> dict[str, float]:
    """Kill the gateway, or (`both`) gateway and executors at once, in each program of `restarts.PROGRAMS`, `kills` times in all."""
    report, names = dict[str, float](), list(restarts.PROGRAMS)
    with tempfile.TemporaryDirectory() as folder, restarts.restartable(Path(folder), *flags, **settings) as server:
        for number, name in enumerate(names):
            share = (kills + len(names) - 1 - number) // len(names)
            tally = restarts.disturb(server, name, share, chance, both=both)
            print(f"{prefix + name:18} {tally}", flush=True)
            report |= {f"{prefix}{name}_{key}": float(value) for key, value in attrs.asdict(tally).items()}
        report[f"{prefix}starts"] = float(server.starts)
    return report


def restarted(options: Options, chance: random.Random) -> dict[str, float]:
    """The gateway is killed and started again; hashes of all tensors and of the random state are compared."""
    return _restarted("restart_", chance, (options.kills + 1) // 2, both=False)


def restarted_both(options: Options, chance: random.Random) -> dict[str, float]:
    """As `restarted`; the executor is killed at the same time."""
    return _restarted("restart_both_", chance, (options.kills + 4) // 5, both=True)


def restarted_pool(options: Options, chance: random.Random) -> dict[str, float]:
    """As `restarted`, with two executors of one server that exchange values."""
    settings = {"placement_policy": "round_robin", "disable": ("local", "recomputation")}
    return _restarted("restart_pool_", chance, (options.kills + 9) // 10, "--device", "all", both=False, **settings)


ROWS: dict[str, Row] = {
    "executor": one_executor,
    "pools": two_executors,
    "own": own_executor,
    "failover": another_server,
    "standby": own_pool,
    "scaled": scaled,
    "saves": saves,
    "moves": moves,
    "restarts": restarted,
    "restarts_both": restarted_both,
    "restarts_pool": restarted_pool,
    "networks": networks,
}


def main() -> None:
    """Disturb both programs and say what came of it."""
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
        report |= ROWS[name](options, chance)
    if options.json:
        print(json.dumps(report))


if __name__ == "__main__":
    main()
