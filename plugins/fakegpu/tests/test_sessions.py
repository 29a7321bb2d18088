"""Sessions that share the device: fetches wait without it, and long and short kernels have equal parts of its time."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from djinn_fakegpu import control
from djinn_fakegpu.process import FakeGpuProcess

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
HERE = str(Path(__file__).parent)


@pytest.fixture(scope="module")
def gpu():
    with FakeGpuProcess() as process:
        yield process


@pytest.mark.parametrize("way", ["fetch", "synchronize"])
def test_session_that_waits_for_its_fetch_does_not_keep_the_others_waiting(gpu, way):
    """The slow copy, or the kernel, takes 1,000 real seconds: the other session would not be answered before."""

    def program(way, folder):
        import sys

        sys.path.insert(0, folder)
        from in_process import Client, executor, until

        context = executor()
        waiting, busy = Client(context, 1 << 20), Client(context, 16)
        for client in (waiting, busy):
            client.submit(synchronize=True)
            client.reply()
        # With `pace`, a wait takes as long as the simulated one.
        control.configure(pace=1.0, link=4e3)
        if way == "synchronize":
            context.device.runtime.ahead_seconds = 1e6  # the device is behind as long as the kernel runs
            control.inject("slow", "aten::relu", seconds=1000.0)
        name = "copies_device_to_host" if way == "fetch" else "launches"
        before = control.counters().get(name, 0)
        waiting.submit(fetch=way == "fetch", synchronize=way == "synchronize")
        until(lambda: control.counters().get(name, 0) > before)
        for _ in range(50):
            busy.submit()
            busy.reply()
        with pytest.raises(TimeoutError):
            waiting.reply(0.0)

    gpu.check(program, way=way, folder=HERE)


def test_long_and_short_kernels_share_device_time_equally(gpu):
    """On the simulated clock: each of the two has 47 to 53% of it."""

    def program(folder):
        import sys
        import threading

        sys.path.insert(0, folder)
        from in_process import Client, executor

        from djinn_server.running.fair_share import FairShare
        from djinn_server.running.issued_turns import IssuedTurns

        control.configure(bandwidth=1e6, launch=0.0)  # 8 ms for each 1,000 numbers, which are read and written
        context = executor()
        context.device.runtime.ahead_seconds = 0.0  # what a turn takes is known before the next one
        context.device.turns = FairShare(IssuedTurns(context.device.runtime), moment=60.0)
        long, short = Client(context, 10_000), Client(context, 1_000)
        for client in (long, short):
            client.submit(synchronize=True)
            client.reply()
        had = []

        def count():
            while True:
                short.reply()
                had.append(1)

        threading.Thread(target=count, daemon=True).start()
        for _ in range(30):
            long.submit()
        for _ in range(600):
            short.submit()
        for _ in range(30):
            long.reply()
        part = 30 * 10 / (30 * 10 + len(had))
        assert 0.47 <= part <= 0.53, (part, len(had))

    gpu.check(program, folder=HERE)
