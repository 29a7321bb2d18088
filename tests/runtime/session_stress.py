"""Threads that begin and end sessions while others use them: `python session_stress.py SECONDS FOLDER`, a client of a configured server.

The folder has a file `weights.safetensors` that the server may read. If no thread finishes a call within `HANG_SECONDS`, the
program prints the stacks of all threads and exits with status 1.
"""

from __future__ import annotations

import faulthandler
import os
import random
import sys
import threading
import time
from collections import Counter

import torch

import djinn

THREADS = 8
HANG_SECONDS = 15.0


def compute() -> None:
    """Run a program that is planned."""
    x = torch.ones(4, 4, device="remote_accelerator")
    assert (x @ x).sum().item() == 64


def open_weights(folder: str) -> None:
    """List the file's tensors and read one."""
    found = djinn.open_weights(f"file://{folder}/weights.safetensors")
    assert found["weight"].tolist() == [1, 2, 3]


def main(seconds: float, folder: str) -> int:
    """Return the exit status."""
    djinn.configure(plan_first_runs=True)
    calls = {
        "init": djinn.init,
        "shut_down": djinn.shut_down,
        "mem_get_info": torch.remote_accelerator.mem_get_info,
        "memory_allocated": torch.remote_accelerator.memory_allocated,
        "open_weights": lambda: open_weights(folder),
        "compute": compute,
    }
    done: list[Counter[str]] = [Counter() for _ in range(THREADS)]
    lost = Counter[str]()
    failed: list[BaseException] = []
    end = time.monotonic() + seconds

    def work(number: int) -> None:
        choices = random.Random(number)
        while time.monotonic() < end and not failed:
            name = choices.choice(list(calls))
            try:
                calls[name]()
            except djinn.SessionLost:  # another thread has ended the session meanwhile
                lost[name] += 1
            except BaseException as error:
                failed.append(error)
                raise
            done[number][name] += 1

    threads = [threading.Thread(target=work, args=(n,), name=f"stress-{n}", daemon=True) for n in range(THREADS)]
    for thread in threads:
        thread.start()
    moved, before = time.monotonic(), [0] * THREADS
    while any(thread.is_alive() for thread in threads):
        time.sleep(0.05)
        counts = [counter.total() for counter in done]
        if counts != before:
            moved, before = time.monotonic(), counts
        elif time.monotonic() > moved + HANG_SECONDS:
            print("no call returns; calls by thread:", counts, flush=True)
            faulthandler.dump_traceback(sys.__stdout__)
            os._exit(1)  # the end of the program would wait as well
    total = sum(done, Counter[str]())
    print("calls:", dict(total), "sessions lost meanwhile:", dict(lost), flush=True)
    return 1 if failed or total.keys() != calls.keys() else 0


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), sys.argv[2]))
