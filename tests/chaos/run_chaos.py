"""Kills executors with SIGKILL at random moments of real programs and compares results with undisturbed runs.

    python tests/chaos/run_chaos.py [--kills 100] [--seed 0] [--json]

One server with one executor. Each run of a program is disturbed once, at a moment drawn evenly over its duration. A table, and
with --json one object on the last line: how many kills, how many runs differed or raised, seconds to recover.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs
import torch

import djinn
from djinn_core.launch.connection_file import read_connection_file
from djinn_core.runtime import client
from djinn_core.runtime.status import ask_servers

REMOTE = "remote_accelerator:0"
START_SECONDS = 120
Program = Callable[[], object]


@contextlib.contextmanager
def serving() -> Iterator[None]:
    """A server of its own, and `remote_accelerator` on it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file = folder / "connection.json"
        command = [sys.executable, "-m", "djinn_core.cli", "serve", "--connection-file", str(file), "--device", "cpu"]
        command += ["--threads", "1", "--journal", str(folder / "journals"), "--store", str(folder / "store")]
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
        deadline = time.monotonic() + START_SECONDS
        while not file.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError((folder / "log").read_text())
            time.sleep(0.05)
        found = read_connection_file(file)
        urls = [url for url in found.urls if url.startswith("tcp")]
        djinn.configure(servers=urls, token=found.token, disable=("local",), threads=1)
        djinn.init()
        try:
            yield
        finally:
            djinn.configure()
            process.terminate()
            process.wait(START_SECONDS)


def executor() -> int:
    """The process of the executor that is ready, waiting for one."""
    while True:
        (status,) = ask_servers(client.settings()).values()
        if not isinstance(status, Exception):
            ready = [one.process for one in status.executors if one.state == "ready"]
            if ready:
                return ready[0]
        time.sleep(0.05)


def generation() -> Program:
    """Greedy decoding of a small Llama."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 500}
    model = LlamaForCausalLM(LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **sizes)).eval().to(REMOTE)
    prompt = torch.randint(0, 500, (1, 12)).to(REMOTE)
    return lambda: model.generate(prompt, max_new_tokens=40, do_sample=False, pad_token_id=0).tolist()


def training() -> Program:
    """Losses of some steps with dropout, AdamW and updates in place."""
    x, y = torch.randn(64, 32), torch.randint(0, 4, (64,))

    def train() -> object:
        torch.manual_seed(5)
        layers = [torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(64, 4)]
        model = torch.nn.Sequential(*layers).to(REMOTE)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        given, wanted = x.to(REMOTE), y.to(REMOTE)
        losses = []
        for _ in range(60):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(given), wanted)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    return train


@attrs.define
class Tally:
    """What came of the disturbed runs of a program."""

    kills: int = 0
    different: int = 0
    raised: int = 0
    recovery: list[float] = attrs.field(factory=list)


def disturb(program: Program, kills: int, chance: random.Random) -> Tally:
    """Run a program so many times, with one kill each."""
    program()  # so that what is timed is not the first run
    started = time.monotonic()
    expected = program()
    usual = time.monotonic() - started
    tally = Tally()
    for _ in range(kills):
        process, moment = executor(), chance.uniform(0.0, usual)
        killer = threading.Timer(moment, os.kill, (process, signal.SIGKILL))
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


def main() -> None:
    """Disturb both programs and say what came of it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    chance = random.Random(options.seed)
    torch.set_num_threads(1)
    report: dict[str, float] = {}
    with serving():
        for name, make in (("generate", generation), ("train", training)):
            tally = disturb(make(), (options.kills + 1) // 2, chance)
            middle = statistics.median(tally.recovery)
            print(
                f"{name:10} {tally.kills} kills, {tally.different} results differed, {tally.raised} raised, "
                f"{middle:.1f} s longer than undisturbed (at most {max(tally.recovery):.1f})"
            )
            report |= {f"{name}_kills": tally.kills, f"{name}_different": tally.different}
            report |= {f"{name}_raised": tally.raised, f"{name}_recovery_s": round(middle, 2)}
    if options.json:
        print(json.dumps(report))


if __name__ == "__main__":
    main()
