"""Measure how long a program waits for a server with room for one session, after the previous program ended.

    python -m evaluation endings [--programs 200] [--seed 1] [--limit 2.0] [--json FILE]

The next program has imported all modules before its predecessor ends, and then connects at once. Its wait is the time in
`djinn.init()`. The lease is ten minutes, so only a handled `Goodbye` frees the place sooner. Exits with 1 if a wait exceeds the limit.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import attrs
import click
from prepared_python import Forks, PreparedPython
from servers import Server, start_server

OPTIONS: Final = ("--threads", "1", "--drain-seconds", "1", "--most-sessions", "1", "--lease-seconds", "600")
MAX_SECONDS: Final = 1.5  # maximum duration of a program's work

PROGRAM = """
import signal, sys, threading, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
import torch, djinn
torch.set_num_threads(1)
work, end, seconds = sys.argv[1], sys.argv[2], float(sys.argv[3])
sys.stdin.readline()
began = time.monotonic()
djinn.init()
print(time.monotonic() - began, flush=True)
d, until = "remote_accelerator:0", time.monotonic() + seconds
x = torch.full((600, 600), 0.001, device=d)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64)).to(d)
optimizer = torch.optim.AdamW(model.parameters())
if work == "thread":
    threading.Thread(target=lambda: [(x @ x).sum().item() for _ in range(10**6)], daemon=True).start()
while time.monotonic() < until:
    if work == "products":
        for _ in range(50):
            x = (x @ x) * 0.001
    elif work == "training":
        optimizer.zero_grad()
        model(torch.randn(512, 64).to(d)).square().mean().backward()
        optimizer.step()
    elif work == "uploads":
        x = (x @ x) * 0.001 + torch.full((4, 600, 600), 0.001).to(d).sum(0)
    elif work == "reading":
        x = x @ x
        x.sum().item()
    else:
        time.sleep(0.05)
if end == "interrupt":
    time.sleep(600)
if end == "exception":
    raise ValueError("the end")
if end == "exit":
    sys.exit(3)
if end == "shut_down":
    djinn.shut_down()
"""
WORKS: Final = ("products", "training", "uploads", "reading", "thread")
ENDS: Final = ("return", "exception", "exit", "shut_down", "interrupt")


@attrs.frozen
class Ending:
    """End of a program.

    Attributes:
        work: name of its work. end: kind of its end. moment: seconds of work before the end.
        took: seconds from this moment until its process ended.
        waited: seconds until the next program had a session.
    """

    work: str
    end: str
    moment: float
    took: float
    waited: float


@attrs.frozen
class _Program:
    work: str
    end: str
    moment: float
    process: Any  # result of `Forks.start_talking`

    def enter(self) -> float:
        """Let the program connect. Return the seconds until it had a session."""
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, f"the next program got no session: exit status {self.process.wait(60)}"
        return float(line)

    def leave(self) -> float:
        """Let the program work until its moment. Return the seconds from that moment to the end of its process."""
        if self.end == "interrupt":
            time.sleep(self.moment)
            self.process.send_signal(signal.SIGINT)
            start = time.monotonic()
        else:
            start = time.monotonic() + self.moment
        self.process.wait(300)
        return time.monotonic() - start


def endings(
    python: Forks, server: Server, environment: Mapping[str, str], programs: int, seed: int
) -> Iterator[Ending]:
    """Run `programs` programs in sequence, each with random work, a random moment and a random end."""
    draw = random.Random(seed)
    variables = {"DJINN_SERVERS": server.url("tcp"), "DJINN_TOKEN": server.token, "DJINN_THREADS": "1"}

    def start() -> _Program:
        work, end, moment = draw.choice(WORKS), draw.choice(ENDS), draw.uniform(0.0, MAX_SECONDS)
        inputs = "-c", PROGRAM, work, end, str(600.0 if end == "interrupt" else moment)
        return _Program(work, end, moment, python.start_talking(*inputs, env={**environment, **variables}))

    now = start()
    now.enter()
    for _ in range(programs):
        after = start()
        with now.process:
            took = now.leave()
            yield Ending(now.work, now.end, now.moment, took, after.enter())
        now = after
    with now.process:
        now.leave()


@click.command()
@click.option("--programs", default=200, help="How many programs end.")
@click.option("--seed", default=1)
@click.option("--limit", default=2.0, help="Maximum seconds that the next program may wait.")
@click.option("--json", "file", type=click.Path(path_type=Path), help="File for the results.")
def main(programs: int, seed: int, limit: float, file: Path | None) -> None:
    """End programs at random moments. Exit with 1 if the next program waited longer than `limit` seconds for a session."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    python = PreparedPython(environment)
    results: dict[str, list[Ending]] = defaultdict(list)
    late = 0
    with tempfile.TemporaryDirectory() as folder:
        server = start_server(python.start, Path(folder), *OPTIONS, env=environment)
        try:
            for ending in endings(python, server, environment, programs, seed):
                results[ending.work].append(ending)
                results["all"].append(ending)
                if ending.waited > limit:
                    late += 1
                    click.echo(f"late: {ending}")
            stop_count = server.log.read_text().count("a program was stopped")
        finally:
            server.stop()
            python.close()
    rows = {work: _row(of_it) for work, of_it in sorted(results.items())}
    for work, row in rows.items():
        click.echo(f"{work:10}" + "  ".join(f"{name} {value}" for name, value in row.items()))
    click.echo(f"{programs} programs, {stop_count} stopped while they computed, {late} successors waited too long")
    if file is not None:
        file.write_text(
            json.dumps({"programs": programs, "stopped": stop_count, "late": late, "work": rows}, indent=1) + "\n"
        )
    sys.exit(bool(late))


def _row(of_it: list[Ending]) -> dict[str, object]:
    waits = sorted(ending.waited for ending in of_it)
    took = sorted(ending.took for ending in of_it)
    return {
        "programs": len(of_it),
        "waited_median": round(waits[len(waits) // 2], 3),
        "waited_longest": round(waits[-1], 3),
        "ended_median": round(took[len(took) // 2], 3),
        "ended_longest": round(took[-1], 3),
    }


if __name__ == "__main__":
    main()
