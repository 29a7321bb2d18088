"""Begin, use and end sessions from several threads: `python session_stress.py SECONDS FOLDER [order]`, a client of a configured server.

The server may read FOLDER/weights.safetensors. If no thread finishes a call within `HANG_SECONDS`, the program prints the stacks of
all threads and exits with status 1. With `order`, it makes more kinds of calls, records the lock order, and exits with status 1 if
this order has a cycle.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch

import djinn

THREADS = 8
HANG_SECONDS = 60.0


def compute() -> None:
    """Run a program that is planned."""
    x = torch.ones(4, 4, device="remote_accelerator")
    assert (x @ x).sum().item() == 64


def open_weights(folder: str) -> None:
    """List the file's tensors and read one."""
    found = djinn.open_weights(f"file://{folder}/weights.safetensors")
    assert found["weight"].tolist() == [1, 2, 3]


def profile() -> None:
    """Record a timeline, unless another thread does."""
    with contextlib.suppress(djinn.DjinnError), djinn.profile():
        compute()


def capture() -> None:
    """Capture a program and explain it."""
    with djinn.capture() as captured:
        x = torch.ones(4, 4, device="remote_accelerator") @ torch.ones(4, 4, device="remote_accelerator")
    djinn.explain(captured)
    del x


def copy_later() -> None:
    """Copy to this machine without waiting, and wait."""
    x = torch.arange(4.0, device="remote_accelerator")
    assert x.to("cpu", non_blocking=True).sum().item() == 6


def share() -> None:
    """Write to a tensor that another thread reads."""
    shared = SHARED.setdefault(0, torch.zeros(2, device="remote_accelerator"))
    shared.add_(1)
    (shared * 2).sum()
    torch.remote_accelerator.empty_cache()


def configure() -> None:
    """Change what plans depend on, in the open session."""
    djinn.configure(latency_target=random.random())


SHARED: dict[int, torch.Tensor] = {}
MORE = (profile, capture, copy_later, share, configure, djinn.synchronize)


def main(seconds: float, folder: str, *, more: bool) -> int:
    """Return the exit status."""
    djinn.configure(memory_limits={"": 1 << 40})
    calls: dict[str, Callable[[], object]] = {
        "init": djinn.init,
        "shut_down": djinn.shut_down,
        "mem_get_info": torch.remote_accelerator.mem_get_info,
        "memory_allocated": torch.remote_accelerator.memory_allocated,
        "open_weights": lambda: open_weights(folder),
        "compute": compute,
    }
    if more:
        calls |= {call.__name__: call for call in MORE}
    done: list[Counter[str]] = [Counter() for _ in range(THREADS)]
    lost = Counter[str]()
    failed: list[BaseException] = []
    end = time.monotonic() + seconds

    def work(number: int) -> None:
        choices, names = random.Random(number), list(calls)
        first = [names[(3 * number + step) % len(names)] for step in range(3)]  # together, the threads make each call
        while (first or time.monotonic() < end) and not failed:
            name = first.pop() if first else choices.choice(names)
            try:
                calls[name]()
            except djinn.errors.SessionLost:  # another thread ended the session
                lost[name] += 1
                SHARED.clear()
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
    ordered = len(sys.argv) > 3
    if ordered:
        sys.path.insert(0, str(Path(__file__).parents[1] / "shared"))
        import lock_order

        lock_order.install()
    status = main(float(sys.argv[1]), sys.argv[2], more=ordered)
    if ordered:
        djinn.shut_down()
        found = lock_order.cycles()
        print(len(lock_order.edges()), "pairs of locks", *found, sep="\n", flush=True)
        status = status or bool(found) or len(lock_order.edges()) < 20
    sys.exit(status)
