"""Injected faults, limits, copies between devices and processes, and captured graphs."""

from __future__ import annotations

import sys

import pytest
import torch

from djinn.testing import FakeGpuProcess
from djinn_fakegpu import control

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")


@pytest.fixture(scope="module")
def gpu():
    with FakeGpuProcess(memory=64 << 20) as process:
        yield process


def test_allocation_over_memory_limit_raises(gpu):
    @gpu.check
    def _():
        kept = torch.zeros(40 << 20, dtype=torch.uint8, device="fakegpu")
        with pytest.raises(
            torch.OutOfMemoryError, match=r"Tried to allocate 41943040 bytes\. fakegpu:0 has 67108864 bytes"
        ):
            torch.zeros(40 << 20, dtype=torch.uint8, device="fakegpu")
        torch.zeros(40 << 20, dtype=torch.uint8, device="fakegpu:1")
        assert torch.accelerator.memory_allocated() == 40 << 20
        assert torch.accelerator.get_memory_info() == (24 << 20, 64 << 20)
        del kept
        for _ in range(50):
            torch.zeros(40 << 20, dtype=torch.uint8, device="fakegpu")
        assert torch.accelerator.memory_allocated() == 0
        assert torch.accelerator.max_memory_allocated() == 40 << 20


def test_injected_out_of_memory_happens_once(gpu):
    @gpu.check
    def _():
        control.inject("out_of_memory", after=1)
        kept = torch.zeros(8, device="fakegpu")
        with pytest.raises(torch.OutOfMemoryError, match="an injected fault"):
            torch.zeros(8, device="fakegpu")
        assert (kept + 1).sum().item() == 8


def test_sticky_error_surfaces_later_and_stays(gpu):
    @gpu.check
    def _():
        big = torch.ones(1 << 20, device="fakegpu")
        control.inject("sticky", "aten::mul", after=1)
        for _ in range(3):
            big * 2  # the host does not know of the error yet
        for call in (torch.accelerator.synchronize, lambda: big + 1, lambda: torch.ones(3).to("fakegpu"), big.cpu):
            with pytest.raises(torch.AcceleratorError, match="fakegpu error 710: device-side assert triggered"):
                call()
        assert control.failed_op() == "aten::mul"


def test_index_out_of_range_is_a_sticky_error(gpu):
    @gpu.check
    def _():
        table = torch.ones(4, 2, device="fakegpu")
        index = torch.tensor([1, 7]).to("fakegpu")
        for call in (lambda: torch.nn.functional.embedding(index, table), lambda: table + 1):
            with pytest.raises(torch.AcceleratorError, match="device-side assert"):
                call()


def test_hung_kernel_is_never_complete(gpu):
    @gpu.check
    def _():
        import threading

        value = torch.ones(8, device="fakegpu")
        torch.accelerator.synchronize()
        control.inject("hang", "aten::add")
        result = value + 1
        event = torch.accelerator.current_stream().record_event()
        waiting = threading.Thread(target=result.cpu, daemon=True)
        waiting.start()
        waiting.join(0.3)
        assert waiting.is_alive()
        assert not event.query()
        other = torch.Stream("fakegpu:1")
        assert other.query()


def test_slow_kernel_takes_its_seconds(gpu):
    @gpu.check
    def _():
        control.inject("slow", "aten::add", seconds=2.0)
        torch.ones(8, device="fakegpu") + 1
        before = control.now()
        assert control.stream_time(torch.accelerator.current_stream()) > 2
        torch.accelerator.synchronize()
        assert control.now() - before > 1.9


def test_paced_clock_takes_real_time(gpu):
    @gpu.check
    def _():
        import time

        control.configure(pace=1.0)
        control.inject("slow", "aten::add", seconds=0.3)
        begin = time.monotonic()
        value = torch.ones(8, device="fakegpu") + 1
        assert time.monotonic() - begin < 0.25
        value.cpu()
        assert time.monotonic() - begin > 0.29


def test_copies_between_devices_run_in_stream_order(gpu):
    @gpu.check
    def _():
        first = torch.arange(1 << 20, dtype=torch.float32, device="fakegpu:0") + 1
        second = first.to("fakegpu:1")
        second.mul_(2)
        back = torch.empty_like(first.t()).copy_(second)
        assert torch.equal(back.cpu(), (torch.arange(1 << 20, dtype=torch.float32) + 1) * 2)
        assert control.counters()["bytes_between_devices"] == 2 * (4 << 20)
        assert first.view(1024, 1024).t().to("fakegpu:1", torch.float64).sum().item() == first.double().sum().item()


def test_device_memory_can_be_opened_in_another_process(gpu):
    @gpu.check
    def _():
        import json
        import os

        reader, writer = os.pipe()
        if not (child := os.fork()):  # before this process uses the device
            place = json.loads(os.read(reader, 4096))
            opened = torch.ops.fakegpu.import_memory(*place, 1)
            numbers = opened.view(torch.int64)
            assert opened.device == torch.device("fakegpu", 1)
            numbers[:5000].mul_(3)
            os._exit(0 if numbers[4999].item() == 3 * 4999 else 1)
        shared = torch.arange(5000, device="fakegpu")[100:]
        torch.accelerator.synchronize()
        os.write(writer, json.dumps(torch.ops.fakegpu.export_memory(shared)).encode())
        assert os.waitpid(child, 0)[1] == 0
        assert shared[0].item() == 300


def test_forked_process_raises_and_leaves_memory_unchanged(gpu):
    """Inject a fault: a process forks after it used the device, and the child uses the device."""

    @gpu.check
    def _():
        import os
        import traceback

        def in_fork(value, event, place):
            assert torch.fakegpu._is_in_bad_fork()
            torch.manual_seed(3)
            calls = [
                lambda: value.add_(1),
                lambda: value.view(-1),
                value.cpu,
                value.sum,
                lambda: value.copy_(torch.zeros(1 << 20)),
                lambda: torch.ones(3, device="fakegpu"),
                lambda: torch.ones(3, device="fakegpu:1"),
                lambda: torch.ops.fakegpu.export_memory(value),
                lambda: torch.ops.fakegpu.import_memory(*place, 0),
                lambda: value.record_stream(torch.Stream("fakegpu")),
                lambda: torch.accelerator.current_stream().record_event(),
                torch.zeros(3).pin_memory,
                torch.accelerator.memory_allocated,
                torch.accelerator.synchronize,
                event.query,
                event.synchronize,
            ]
            for call in calls:
                with pytest.raises(RuntimeError, match="forked after the device was used"):
                    call()

        assert not torch.fakegpu._is_in_bad_fork()
        values = [torch.ones(1 << 20, device="fakegpu") for _ in range(4)]
        event, place = torch.accelerator.current_stream().record_event(), torch.ops.fakegpu.export_memory(values[0])
        if not (child := os.fork()):
            try:
                in_fork(values[0], event, place)
                values.clear()  # more than fits into the quarantine
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        assert not torch.fakegpu._is_in_bad_fork()
        assert [value.sum().item() for value in values] == 4 * [1 << 20]


def test_failed_import_frees_memory(gpu):
    @gpu.check
    def _():
        from pathlib import Path

        path, _, size = torch.ops.fakegpu.export_memory(torch.ones(8, device="fakegpu"))

        def fail(times):
            for _ in range(times):
                with pytest.raises(RuntimeError, match="cannot be mapped"):
                    torch.ops.fakegpu.import_memory(path, 1 << 50, size, 0)
            return int(Path("/proc/self/statm").read_text().split()[1])

        before = fail(2000)
        assert fail(20_000) - before < 256  # pages


def test_graph_refuses_imported_memory(gpu):
    """A graph could not detect that imported memory was freed."""

    @gpu.check
    def _():
        stream, graph = torch.Stream("fakegpu"), torch.accelerator.Graph()
        own = torch.ones(8, device="fakegpu")
        imported = torch.ops.fakegpu.import_memory(*torch.ops.fakegpu.export_memory(own), 0)
        with stream:
            graph.__enter__()
            with pytest.raises(RuntimeError, match="stream is capturing: an op on memory of another process"):
                imported + 1
            with pytest.raises(RuntimeError, match="the capture failed: an op on memory of another process"):
                graph.__exit__()
            assert imported.view(torch.float32).sum().item() == 8


def test_graph_copies_complete_when_graph_ends(gpu):
    @gpu.check
    def _():
        stream, graph = torch.Stream("fakegpu"), torch.accelerator.Graph()
        given, found, again = (torch.zeros(1 << 20, pin_memory=True) for _ in range(3))
        there = torch.empty(1 << 20, device="fakegpu")
        with stream, graph:
            there.copy_(given, non_blocking=True)
            result = there * 2
            found.copy_(result, non_blocking=True)
            there.copy_(found, non_blocking=True)
            again.copy_(there + 1, non_blocking=True)
        given.fill_(3)
        with stream, control.Counted() as counted:
            graph.replay()
            assert (found.sum().item(), again.sum().item()) == (6 << 20, 0)  # the graph's second upload read `found`
            stream.synchronize()
            assert (found[0].item(), again.sum().item()) == (6, 7 << 20)
        for direction in ("host_to_device", "device_to_host"):
            assert (counted["copies_" + direction], counted["bytes_" + direction]) == (2, 8 << 20), counted
        with stream:
            graph.replay()
            given[0] = 5
            with pytest.raises(RuntimeError, match="changed 4194304 bytes of page-locked memory while an upload read"):
                stream.synchronize()


def test_freed_pinned_memory_is_reused(gpu):
    @gpu.check
    def _():
        for _ in range(10):
            torch.empty(5000, dtype=torch.uint8, pin_memory=True)
        first, second = (torch.empty(5000, dtype=torch.uint8, pin_memory=True) for _ in range(2))
        assert first.data_ptr() != second.data_ptr()
        counted = control.counters()
        assert (counted["host_allocations"], counted["pinned_bytes_peak"]) == (2, 16384)


def test_pinned_block_is_not_reused_while_a_copy_reads_it(gpu):
    @gpu.check
    def _():
        there = torch.empty(4 << 20, dtype=torch.uint8, device="fakegpu")
        pinned = torch.ones(4 << 20, dtype=torch.uint8).pin_memory()
        address = pinned.data_ptr()
        there.copy_(pinned, non_blocking=True)
        del pinned
        other = torch.zeros(4 << 20, dtype=torch.uint8).pin_memory()
        assert other.data_ptr() != address
        torch.accelerator.synchronize()
        assert torch.empty(4 << 20, dtype=torch.uint8, pin_memory=True).data_ptr() == address


def test_graph_replays_on_the_captured_addresses(gpu):
    @gpu.check
    def _():
        stream = torch.Stream("fakegpu")
        given, kept = torch.ones(8, device="fakegpu"), torch.zeros(8, device="fakegpu")
        graph = torch.accelerator.Graph()
        with stream, graph:
            result = (given * 2 + 1).relu()
            kept.add_(result)
        with stream, control.Counted() as counted:
            assert kept.sum().item() == 0
            for round_ in range(1, 4):
                given.fill_(round_)
                graph.replay()
                assert result.sum().item() == 8 * (2 * round_ + 1)
            assert kept.sum().item() == 8 * (3 + 5 + 7)
        assert (counted["graph_launches"], counted["ops_in_graphs"], counted["ops_outside_graphs"]) == (3, 12, 8), (
            counted
        )


def test_random_ops_of_a_graph_draw_anew(gpu):
    @gpu.check
    def _():
        stream, graph = torch.Stream("fakegpu"), torch.accelerator.Graph()
        with stream:
            torch.manual_seed(5)
            with graph:
                drawn = torch.rand(4, device="fakegpu")
            torch.manual_seed(5)
            graph.replay()
            first = drawn.cpu()
            graph.replay()
            second = drawn.cpu()
        torch.manual_seed(5)
        assert torch.equal(first, torch.rand(4))
        assert torch.equal(second, torch.rand(4))


def test_graph_on_a_moved_address_raises(gpu):
    """Inject a fault: the tensor that a graph reads is replaced."""

    @gpu.check
    def _():
        stream, graph = torch.Stream("fakegpu"), torch.accelerator.Graph()
        given = torch.ones(8, device="fakegpu")
        with stream:
            with graph:
                result = given + 1
            graph.replay()
            torch.accelerator.synchronize()
            given = torch.zeros(8, device="fakegpu")
            with pytest.raises(RuntimeError, match="whose tensor was freed since the capture"):
                graph.replay()
            del result


def test_host_read_during_capture_invalidates_graph(gpu):
    """Injected fault: the host waits while a stream is captured."""

    @gpu.check
    def _():
        stream, graph = torch.Stream("fakegpu"), torch.accelerator.Graph()
        value = torch.ones(8, device="fakegpu")
        with stream:
            graph.__enter__()
            with pytest.raises(RuntimeError, match="not permitted when a stream is capturing: reading a number"):
                value.sum().item()
            with pytest.raises(RuntimeError, match="the capture failed: reading a number"):
                graph.__exit__()
            assert value.sum().item() == 8


def test_graph_keeps_its_memory_until_it_is_reset(gpu):
    @gpu.check
    def _():
        stream, graph = torch.Stream("fakegpu"), torch.accelerator.Graph()
        given = torch.ones(1 << 18, device="fakegpu")
        with stream:
            with graph:
                result = given + 1
            del result
            graph.replay()
            assert torch.accelerator.memory_allocated() == 2 << 20
            graph.reset()
            assert torch.accelerator.memory_allocated() == 1 << 20


def test_graphs_of_one_pool_share_unused_memory(gpu):
    @gpu.check
    def _():
        given, stream, captured = torch.ones(1 << 18, device="fakegpu"), torch.Stream("fakegpu"), []

        def capture(pool=None):
            graph = torch.accelerator.Graph(pool=pool)
            with stream, graph:
                result = ((given + 1) * 2 - 3) * 4
            captured.append((graph, result))
            return torch.accelerator.memory_allocated() >> 20

        # A chain needs two blocks. The second graph of a pool needs one more: the first one's result is alive.
        assert [capture(), capture(captured[0][0].pool()), capture()] == [3, 4, 6]
        first, second, other = [graph.pool() for graph, _ in captured]
        assert first == second != other
        with stream:
            for graph, result in captured:
                graph.replay()
                assert result.sum().item() == 4 << 18
        while captured:
            graph, result = captured.pop()
            graph.reset()
        del result
        assert torch.accelerator.memory_allocated() == 1 << 20


@pytest.mark.parametrize("mode", ["thread_local", "global"])
def test_wait_in_other_thread_invalidates_global_capture(gpu, mode):
    def program(mode):
        import threading

        stream, graph = torch.Stream("fakegpu"), torch.accelerator.Graph(capture_error_mode=mode)
        value, found = torch.ones(8, device="fakegpu"), []

        def wait():
            try:
                found.append(value.sum().item())
            except RuntimeError as error:
                found.append("operation not permitted" in str(error))

        with stream:
            graph.__enter__()
            result = value + 1
            waiting = threading.Thread(target=wait)
            waiting.start()
            waiting.join()
            if mode == "global":
                with pytest.raises(RuntimeError, match="the capture failed"):
                    graph.__exit__()
                assert found == [True]
                return
            graph.__exit__()
            graph.replay()
            assert (found, result.sum().item()) == ([8.0], 16.0)

    gpu.check(program, mode=mode)


def test_graph_waits_for_page_locked_input_only(gpu):
    @gpu.check
    def _():
        stream, graph, other = torch.Stream("fakegpu"), torch.accelerator.Graph(), torch.Stream("fakegpu")
        weight, given, pinned = (
            torch.ones(8, device="fakegpu"),
            torch.empty(8, device="fakegpu"),
            torch.zeros(8, pin_memory=True),
        )
        with stream, graph:
            given.copy_(pinned, non_blocking=True)
            result = given + weight
        pinned.fill_(4)
        with stream:
            graph.replay()
        with other:
            weight + 1
            with pytest.raises(
                RuntimeError, match=r"missing wait: aten::add on stream .* reads a block .* which a graph writes"
            ):
                given + 1
        with stream:
            assert result.sum().item() == 40
