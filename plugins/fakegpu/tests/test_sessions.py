"""Sessions that share the device: non-blocking fetches, and equal shares for long and short kernels."""

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
def test_waiting_fetch_does_not_block_other_sessions(gpu, way):
    """The slow copy, or the kernel, takes 1,000 real seconds. The other session must be answered earlier."""

    def program(way, folder):
        import sys

        sys.path.insert(0, folder)
        from in_process import Client, executor, wait_until

        context = executor()
        waiting, busy = Client(context, 1 << 20), Client(context, 16)
        for client in (waiting, busy):
            client.submit(synchronize=True)
            client.reply()
        # With `pace`, a wait takes as long in real time as in simulated time.
        control.configure(pace=1.0, link=4e3)
        if way == "synchronize":
            context.device.runtime.ahead_seconds = 1e6  # the device is late while the kernel runs
            control.inject("slow", "aten::relu", seconds=1000.0)
        name = "copies_device_to_host" if way == "fetch" else "launches"
        before = control.counters().get(name, 0)
        waiting.submit(fetch=way == "fetch", synchronize=way == "synchronize")
        wait_until(lambda: control.counters().get(name, 0) > before)
        for _ in range(50):
            busy.submit()
            busy.reply()
        with pytest.raises(TimeoutError):
            waiting.reply(0.0)

    gpu.check(program, way=way, folder=HERE)


def test_long_and_short_kernels_share_device_time_equally(gpu):
    """On the simulated clock, each of the two sessions gets 47 to 53% of it."""

    def program(folder):
        import sys
        import threading

        sys.path.insert(0, folder)
        from in_process import Client, executor

        from djinn_server.running.fair_share import FairShare
        from djinn_server.running.issued_turns import IssuedTurns

        control.configure(bandwidth=1e6, launch=0.0)  # 8 ms for each 1,000 numbers, which are read and written
        context = executor()
        context.device.runtime.ahead_seconds = 0.0  # the duration of a turn is known before the next turn
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


def test_session_rate_beside_waiting_fetch(gpu):
    """Measured on the simulated clock. The fetch of the other session never ends."""

    def program(folder):
        import sys

        sys.path.insert(0, folder)
        from in_process import Client, executor, wait_until

        context = executor()
        waiting, busy = Client(context, 1 << 20), Client(context, 1 << 16)
        for client in (waiting, busy):
            client.submit(synchronize=True)
            client.reply()

        def seconds_of_100():
            began = control.now()
            for _ in range(100):
                busy.submit(synchronize=True)
                busy.reply()
            return control.now() - began

        alone = seconds_of_100()
        control.inject("hang", "a download")
        before = control.counters().get("copies_device_to_host", 0)
        waiting.submit(fetch=True)
        wait_until(lambda: control.counters().get("copies_device_to_host", 0) > before)
        assert alone / seconds_of_100() >= 0.95
        with pytest.raises(TimeoutError):
            waiting.reply(0.0)

    gpu.check(program, folder=HERE)


def test_load_and_replies_agree_with_device_counters(gpu):
    """One session queues long kernels quickly; the other waits for each of its short kernels."""

    def program(folder):
        import sys
        from types import SimpleNamespace

        sys.path.insert(0, folder)
        from in_process import Client, executor

        from djinn_core.wire.executor_reports import ExecutorMetrics, Sessions
        from djinn_core.wire.messages import DeviceInfo
        from djinn_server.gateway import assignment

        control.configure(bandwidth=1e9)
        context = executor()
        long, short = Client(context, 10_000_000), Client(context, 500_000)
        for client in (long, short):
            client.submit(synchronize=True)
            client.reply()
        assignment.time = SimpleNamespace(monotonic=control.now)
        meter, turns, replied, found = assignment.LoadMeter(), context.device.turns, 0.0, []

        def read_times():
            counters = {"device_seconds": turns.device_seconds()}
            meter.update(Sessions(1, DeviceInfo("fakegpu:0", "fakegpu"), (), ExecutorMetrics(counters)))
            return control.counters()["busy_ns"] / 1e9, control.now(), counters["device_seconds"]

        def advance_clock(seconds):
            control.configure(issue=seconds)
            context.device.runtime.mark()
            control.configure(issue=4e-6)

        busy, now, used = read_times()
        for count, each, pause in ((4, 5, 0.0), (0, 20, 0.0), (0, 20, 0.1), (1, 0, 0.2)):
            advance_clock(pause)
            for _ in range(count):
                long.submit()
            for _ in range(each):
                short.submit(synchronize=True)
                replied += short.reply().timing.execute
            if count:
                long.submit(synchronize=True)
                replied += sum(long.reply().timing.execute for _ in range(count + 1))
            before, (busy, now, used) = (busy, now, used), read_times()
            expected = (busy - before[0]) / (now - before[1])
            assert 0.95 * expected <= meter.load().busy <= min(1.0, 1.05 * expected), (meter.load().busy, expected)
            assert used - before[2] <= now - before[1]
            found.append(used - before[2])
        assert replied == pytest.approx(sum(found), rel=1e-6)

    gpu.check(program, folder=HERE)


def test_quota_ends_the_session_with_long_kernels(gpu):
    """The session with short kernels issues more of them, which takes more host time."""

    def program(folder):
        import sys

        sys.path.insert(0, folder)
        from in_process import Client, executor, wait_until

        from djinn_core.errors import QuotaExceeded
        from djinn_server.hookspecs.quotas import Quota

        control.configure(bandwidth=1e9)
        tenants = [executor(), executor()]
        long, short = Client(tenants[0], 10_000_000), Client(tenants[1], 1_000)
        for tenant in tenants:
            tenant.device.runtime.ahead_seconds = 0.0  # the duration of a turn is known before the next turn
            tenant.usage.quota = Quota(seconds_an_hour=0.5)
        for _ in range(200):
            short.submit()
        for _ in range(200):
            short.reply()
        issued = 0

        def is_over():
            if long.ended is not None:
                return True
            try:
                return long.reply(0.0) is not None
            except TimeoutError:
                return False

        while long.ended is None:
            long.submit()
            issued += 1
            wait_until(is_over)
        assert isinstance(long.ended, QuotaExceeded)
        assert 8 <= issued <= 10, issued  # of 80 ms each
        assert short.ended is None
        assert tenants[1].usage.account.used()[0] < 0.1

    gpu.check(program, folder=HERE)
