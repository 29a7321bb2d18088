"""Inject faults into a server's devices at random ops; check error reports, unaffected sessions and leaked memory.

    python -m evaluation device-faults [--faults 100] [--seed 0] [--only sticky hang out_of_memory] [--json]

A server has two devices that behave like GPUs (`plugins/fakegpu`), with a journal. Two programs share the first device,
one has the second. Each uses an op that the others do not. A fault is injected into one device at such an op, or at any
kernel. Every program then runs a round, whose results must be bitwise equal to those of a CPU, or be an error that
names the fault.

A session that gets an error makes its tensors anew. After each fault comes a round without one. It must succeed
everywhere, on ready executors, with as much device memory as before. Prints a table, and with --json one object on the
last line. Exits with 1 on any violation.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import attrs
from prepared_python import Forks, PreparedPython
from servers import Server, started_server

from djinn_fakegpu.library import build
from djinn_fakegpu.remote_control import RemoteControl

KINDS: Final = ("sticky", "hang", "out_of_memory")
OWN: Final = ("sin", "cos", "atan")  # the op that only one program uses, for each program
SHARED: Final = ("aten::mm", "aten::add", "aten::mul", "aten::cat", "aten::_softmax", "aten::")
ROUNDS: Final = 6  # rounds in which an injected fault must occur
HANG_SECONDS: Final = 1
LEAVING_SECONDS: Final = 60  # timeout for sessions of ended programs to free their memory

PROGRAM: Final = """
import gc, json, sys
import torch, djinn

torch.set_num_threads(1)
own, remote = getattr(torch, sys.argv[1]), "remote_accelerator:0"


def begin(device):
    return {"w": torch.linspace(-1, 1, 32 * 32).reshape(32, 32).to(device), "kept": None}


def work(device, state, number):
    x = torch.full((32, 32), 0.01 * (number % 7 + 1)).to(device)
    for _ in range(3):
        x = own(x @ state["w"]) * 0.5 + 0.1
        state["w"].mul_(0.999).add_(x, alpha=1e-3)
    found = [x.sum().item()]
    y = torch.cat([x, own(x)]).softmax(-1)
    state["kept"] = (y[:5] + 1, y.t().contiguous())
    found += [y.double().sum().item(), *(one.double().sum().item() for one in state["kept"])]
    return found


here, there = begin("cpu"), begin(remote)
print("ready", flush=True)
for line in sys.stdin:
    number = int(line)
    answer = {"error": ""}
    try:
        found = work(remote, there, number)
        djinn.synchronize()
        answer["equal"] = found == work("cpu", here, number)
    except Exception as error:
        answer = {"error": type(error).__name__, "message": str(error)}
        del error
        there = None
        gc.collect()
        djinn.init()
        here, there = begin("cpu"), begin(remote)
    gc.collect()
    print(json.dumps(answer), flush=True)
"""


class Client:
    """A program in a separate process on one of the devices. `own`: the op that only this program uses."""

    def __init__(self, python: Forks, environment: Mapping[str, str], server: Server, own: str, device: int) -> None:
        self.own, self.device = own, device
        variables = {"DJINN_SERVERS": server.url("tcp"), "DJINN_TOKEN": server.token, "DJINN_THREADS": "1"}
        variables |= {"DJINN_SERVER_DEVICES": str(device), "DJINN_DISABLE": "local"}
        self.process = python.start_talking("-c", PROGRAM, own, env={**environment, **variables})
        assert self._line() == "ready"

    def begin(self, number: int) -> None:
        """Start round `number`."""
        self.process.stdin.write(f"{number}\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """Return the outcome of the round: `error` and `message`, or whether the results are `equal`."""
        return json.loads(self._line())

    def close(self) -> None:
        """End the process and its session."""
        with self.process:
            self.process.stdin.close()
            self.process.wait(300)

    def _line(self) -> str:
        line = self.process.stdout.readline()
        assert line, f"the program with {self.own} ended: exit status {self.process.wait(60)}"
        return line.strip()


@attrs.frozen
class Planted:
    """A fault to inject.

    Attributes:
        after: number of calls of the op before the fault.
        victim: number of the only client that uses the op, or None if several use it.
        twice: True if the retry of the op fails as well.
    """

    kind: str
    op: str
    after: int
    device: int
    victim: int | None
    twice: bool


@attrs.define
class Tally:
    """Outcomes of all faults of a kind.

    Attributes:
        told: faults that a client received as an error. named: errors that name the faulty op.
        told_nobody: faults that no client noticed.
        problems: number of violations, by description.
    """

    faults: int = 0
    told: int = 0
    named: int = 0
    told_nobody: int = 0
    problems: Counter[str] = attrs.field(factory=Counter)

    def figures(self) -> dict[str, int]:
        """Return numbers by name."""
        counts = {"faults": self.faults, "told": self.told, "named": self.named, "told_nobody": self.told_nobody}
        return counts | {"problems": self.problems.total()}


def draw(kind: str, chance: random.Random) -> Planted:
    """Return a fault of this kind at a random op."""
    device = chance.randrange(2)
    twice = kind == "out_of_memory" and chance.random() < 0.5
    if kind == "out_of_memory":
        return Planted(kind, "", chance.randrange(40), device, None, twice)
    number = chance.choice((0, 1)) if device == 0 else 2
    if chance.random() < 0.5:
        return Planted(kind, f"aten::{OWN[number]}", chance.randrange(4), device, number, twice)
    return Planted(kind, chance.choice(SHARED), chance.randrange(4), device, 2 if device else None, twice)


class Bench:
    """A server with two devices, and three programs on them."""

    def __init__(self, python: Forks, environment: Mapping[str, str], folder: Path) -> None:
        build()  # built now, because it may take longer than the start timeout of an executor
        file = folder / "connection.json"
        command = ["-m", "djinn_core.cli", "serve", "--connection-file", file, "--threads", "1"]
        command += ["--device", "fakegpu:0", "--device", "fakegpu:1", "--hang-seconds", HANG_SECONDS]
        command += ["--state-dir", folder / "state", "--store", folder / "store", "--drain-seconds", "1"]
        server_environment = {**environment, "DJINN_PLUGIN_FAKEGPU_CONTROL": str(folder)}
        self.server = started_server(python.start, command, folder, server_environment)
        self.controls = [RemoteControl(folder, index) for index in range(2)]
        self.clients = [Client(python, environment, self.server, own, int(own == OWN[2])) for own in OWN]
        self._number = 0
        self.round()
        self._memory = self._allocated()

    def close(self) -> list[int]:
        """End the programs and the server. Return the bytes that were still allocated on each device without sessions."""
        for client in self.clients:
            client.close()
        deadline = time.monotonic() + LEAVING_SECONDS
        while any(allocated := self._allocated()) and time.monotonic() < deadline:
            time.sleep(0.05)
        self.server.stop()
        return allocated

    def processes(self) -> list[int]:
        """Return the executor processes."""
        return [control.process() for control in self.controls]

    def round(self) -> list[dict[str, Any]]:
        """Run a round in all programs at the same time."""
        self._number += 1
        for client in self.clients:
            client.begin(self._number)
        return [client.answer() for client in self.clients]

    def suffer(self, fault: Planted, tally: Tally) -> None:
        """Inject a fault, run the programs until it has occurred, and count the outcome."""
        control, before = self.controls[fault.device], self.processes()
        for _ in range(1 + fault.twice):
            control.inject(fault.kind, fault.op, after=fault.after)
        answers = []
        for _ in range(ROUNDS):
            answers = self.round()
            if self._has_happened(fault, before):
                break
        else:
            tally.problems[f"{fault} did not happen"] += 1
        self._judge(fault, answers, tally)
        after = self.processes()
        changes = [number for number in range(2) if before[number] != after[number]]
        if changes != ([] if fault.kind == "out_of_memory" else [fault.device]):
            tally.problems[f"{fault}: executors {changes} were restarted"] += 1
        again = self.round()
        tally.problems.update([f"{fault}: a later round failed: {item}" for item in again if not item.get("equal")])
        if all(item.get("equal") for item in again) and (memory := self._allocated()) != self._memory:
            tally.problems[f"{fault}: {memory} bytes are in use, and not {self._memory}"] += 1

    def _has_happened(self, fault: Planted, before: list[int]) -> bool:
        if fault.kind == "out_of_memory":
            return not self.controls[fault.device].pending()
        return self.processes()[fault.device] != before[fault.device]

    def _judge(self, fault: Planted, answers: Sequence[dict[str, Any]], tally: Tally) -> None:
        tally.faults += 1
        report = [number for number, answer in enumerate(answers) if answer["error"]]
        tally.told += bool(report)
        tally.told_nobody += not report
        there = [number for number, client in enumerate(self.clients) if client.device == fault.device]
        allowed = there if fault.victim is None else [fault.victim]
        if len(report) > 1 or not {*report} <= {*allowed}:
            tally.problems[f"{fault}: programs {report} were told: {[answers[item] for item in report]}"] += 1
        for number, answer in enumerate(answers):
            if number not in report and not answer["equal"]:
                tally.problems[f"{fault}: results of program {number} are wrong"] += 1
        for number in report:
            tally.named += self._names(fault, answers[number], tally)

    def _names(self, fault: Planted, answer: Mapping[str, str], tally: Tally) -> bool:
        """Return True if the message names one op, or need not (out of memory). Count wrong messages as problems."""
        message = answer["message"]
        if fault.kind == "out_of_memory":
            if answer["error"] != "RemoteOutOfMemoryError" and "memory" not in message:
                tally.problems[f"{fault}: {answer}"] += 1
            return True
        word = "hangs" if fault.kind == "hang" else "failed"
        match = re.search(rf"(an op at or before )?(aten::\w+)\S* \(op \d+ of submission \d+\) {word}", message)
        if match is None:
            tally.problems[f"{fault}: no op is named: {message}"] += 1
            return False
        if match[1] is None and fault.op not in match[2]:
            tally.problems[f"{fault}: {match[2]} is named"] += 1
        return match[1] is None

    def _allocated(self) -> list[int]:
        return [control.allocated() for control in self.controls]


def suffer_all(
    python: Forks, environment: Mapping[str, str], folder: Path, faults: Sequence[Planted]
) -> dict[str, Tally]:
    """Inject faults one after the other. Return the outcomes by kind."""
    tallies = {kind: Tally() for kind in dict.fromkeys(fault.kind for fault in faults)}
    bench = Bench(python, environment, folder)
    try:
        for fault in faults:
            bench.suffer(fault, tallies[fault.kind])
    except BaseException:
        bench.server.stop()
        sys.stderr.write(bench.server.log.read_text()[-20_000:])
        raise
    leaked = bench.close()
    if any(leaked):
        tallies[faults[0].kind].problems[f"{leaked} bytes are left without sessions"] += 1
    return tallies


def main() -> None:
    """Inject all faults and report the outcomes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--faults", type=int, default=100, help="of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=KINDS, nargs="+", default=list(KINDS))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    chance = random.Random(options.seed)
    faults = [draw(kind, chance) for kind in options.only for _ in range(options.faults)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    python = PreparedPython(environment)
    try:
        with tempfile.TemporaryDirectory(prefix="faults-") as folder:
            tallies = suffer_all(python, environment, Path(folder), faults)
    finally:
        python.close()
    for kind, tally in tallies.items():
        print(f"{kind:14} " + ", ".join(f"{value} {name}" for name, value in tally.figures().items()), flush=True)
        for problem, count in tally.problems.items():
            print(f"  {count} times: {problem}")
    if options.json:
        print(json.dumps({f"{kind}_{n}": v for kind, tally in tallies.items() for n, v in tally.figures().items()}))
    sys.exit(any(tally.problems for tally in tallies.values()))


if __name__ == "__main__":
    main()
