"""The device `fakegpu` in separate processes: memory, ops, streams, the clock and counters."""

from __future__ import annotations

import signal
import sys

import pytest
import torch

import djinn_fakegpu
from djinn.errors import StartupError
from djinn.testing import FakeGpuProcess, PluginConformance
from djinn_fakegpu import FakeGpuDevice, Settings, control
from djinn_server.builtins.cpu import CpuDevice
from djinn_server.devices import open_device

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")


@pytest.fixture(scope="module")
def gpu():
    with FakeGpuProcess() as process:
        yield process


class TestPlugin(PluginConformance):
    @pytest.fixture
    def plugin(self):
        return djinn_fakegpu


def test_fakegpu_discovers_configured_devices():
    found = FakeGpuDevice(Settings(devices=3, memory_mib=512)).discover()
    assert [(one.id, one.memory) for one in found] == [(f"fakegpu:{index}", 512 << 20) for index in range(3)]


def test_opening_missing_device_raises():
    with pytest.raises(StartupError, match=r"no device fakegpu:2: the setting plugins\.fakegpu\.devices is 2"):
        FakeGpuDevice().open(2)


def test_executor_uses_fake_device_only_if_named():
    devices = [CpuDevice(), FakeGpuDevice()]
    assert open_device(devices, "").capabilities.id == "cpu:0"


def test_fakegpu_runs_without_pytest(monkeypatch, tmp_path):
    (tmp_path / "pytest.py").write_text("raise ImportError")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with FakeGpuProcess() as process:
        process.check("assert pytest is None\nassert torch.ones(3, device='fakegpu').sum().item() == 3")


def test_program_file_is_readable_by_owner_only(gpu):
    @gpu.check
    def _():
        import stat
        import sys
        from pathlib import Path

        assert stat.S_IMODE(Path(sys.argv[0]).stat().st_mode) == 0o600


def test_device_passes_conformance_suite(gpu):
    @gpu.check
    def _():
        import inspect

        from djinn.testing import DeviceConformance
        from djinn_fakegpu import FakeGpuDevice

        given = {"device": FakeGpuDevice(), "runtime": FakeGpuDevice().open(0)}
        tests = [getattr(DeviceConformance(), name) for name in dir(DeviceConformance) if name.startswith("test_")]
        assert len(tests) > 5
        for test in tests:
            test(**{name: given[name] for name in inspect.signature(test).parameters})


def test_inference_mode_makes_views_of_ordinary_tensors(gpu):
    @gpu.check
    def _():
        value = torch.ones(4, 4, device="fakegpu")
        with torch.inference_mode():
            assert [one.is_inference() for one in (value.view(16), value.t(), value + 1)] == [False, False, True]
            (value + 1).view(16)[3:].add_(1)


def test_bytes_round_trip(gpu):
    @gpu.check
    def _():
        for dtype in (torch.uint8, torch.float32, torch.bool, torch.complex64, torch.bfloat16):
            sent = torch.arange(4 * 6).to(dtype).view(4, 6)
            there = sent.to("fakegpu:1")
            assert there.device == torch.device("fakegpu", 1)
            assert torch.equal(there.cpu(), sent)
            assert torch.equal(there.t()[1:, ::2].cpu(), sent.t()[1:, ::2])
            assert torch.equal(there.to("cpu", torch.float64), sent.to(torch.float64))
        assert torch.empty(0, device="fakegpu").cpu().numel() == 0


def test_training_equals_the_cpu_bitwise(gpu):
    @gpu.check
    def _():
        def train(device):
            torch.manual_seed(3)
            layers = [
                torch.nn.Conv2d(3, 8, 3),
                torch.nn.BatchNorm2d(8),
                torch.nn.ReLU(),
                torch.nn.Flatten(),
                torch.nn.Linear(8 * 36, 5),
            ]
            model = torch.nn.Sequential(*layers).to(device)
            optimizer = torch.optim.AdamW(model.parameters())
            for _ in range(3):
                images, labels = torch.randn(4, 3, 8, 8).to(device), torch.randint(5, (4,)).to(device)
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(images), labels).backward()
                optimizer.step()
            return [value.cpu() for value in model.state_dict().values()]

        for there, here in zip(train("fakegpu"), train("cpu"), strict=True):
            assert torch.equal(there, here)


def test_random_numbers_equal_cpu(gpu):
    @gpu.check
    def _():
        def draw(device):
            generator = torch.Generator(device).manual_seed(5)
            torch.manual_seed(7)
            of_default = [
                torch.rand(3, device=device),
                torch.randn(20, device=device),
                torch.randperm(9, device=device),
            ]
            return [
                *of_default,
                torch.rand(3, device=device, generator=generator),
                torch.empty(9, device=device).exponential_(),
            ]

        for there, here in zip(draw("fakegpu"), draw("cpu"), strict=True):
            assert torch.equal(there.cpu(), here)
        state = torch.fakegpu.get_rng_state()
        first = torch.rand(3, device="fakegpu").cpu()
        torch.fakegpu.set_rng_state(state)
        assert torch.equal(torch.rand(3, device="fakegpu").cpu(), first)


def test_views_and_in_place_ops_share_memory(gpu):
    @gpu.check
    def _():
        base = torch.zeros(4, 4, device="fakegpu")
        view = base.view(16)[4:8]
        view.add_(1)
        torch.add(view, 1, out=view)
        base.t()[0].mul_(3)
        assert view.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()
        expected = torch.zeros(4, 4)
        expected[1] = 2
        expected[1, 0] = 6
        assert torch.equal(base.cpu(), expected)
        grown = torch.empty(0, device="fakegpu")
        torch.add(base, base, out=grown)
        assert torch.equal(grown.cpu(), 2 * expected)
        cat = torch.cat([base, grown]).chunk(2)[1]
        assert torch.equal(cat.cpu(), 2 * expected)


def test_conjugates_and_negatives_are_views(gpu):
    @gpu.check
    def _():
        here = torch.randn(5, dtype=torch.complex64)
        there = here.to("fakegpu")
        assert torch.equal((there.conj() * 2).cpu(), here.conj() * 2)
        assert torch.equal(there.conj().cpu(), here.conj())
        assert torch.equal(there.conj().imag.cpu(), here.conj().imag)
        assert torch.equal(there.mul_(there.conj()).cpu(), here * here.conj())


def test_mixed_devices_raise(gpu):
    @gpu.check
    def _():
        for other in (torch.ones(2), torch.ones(2, device="fakegpu:1")):
            with pytest.raises(RuntimeError) as raised:
                torch.ones(2, device="fakegpu:0") + other
            assert "same device" in str(raised.value)
        assert (torch.ones(2, device="fakegpu:1") + torch.tensor(2.0)).sum().item() == 6


def test_host_access_to_device_memory_ends_the_process(gpu):
    """Inject a fault: the host reads device memory."""

    def read():
        import ctypes

        ctypes.c_char.from_address(torch.ones(3, device="fakegpu").data_ptr()).value  # noqa: B018

    outcome = gpu.run(read)
    assert outcome.returncode == -signal.SIGSEGV
    assert "fakegpu: the host accessed memory of fakegpu:0 at 0x" in outcome.output


def test_freed_block_in_use_raises(gpu):
    """Inject a fault: an op reads a tensor whose memory was freed and not reused."""

    @gpu.check
    def _():
        old = torch.ones(8, device="fakegpu")
        alias = torch.empty(0, device="fakegpu")
        storage = torch._C._construct_storage_from_data_pointer(old.data_ptr(), old.device, 32)
        alias.set_(storage, 0, (8,), (1,))
        assert (alias + 1).sum().item() == 16
        del old
        with pytest.raises(RuntimeError) as raised:
            alias + 1
        assert "uses a freed block of 32 bytes" in str(raised.value)


def test_missing_wait_names_op_and_streams(gpu):
    """Inject a fault: a kernel and a copy read memory that another stream writes, without an event wait."""

    @gpu.check
    def _():
        other = torch.Stream("fakegpu")
        written = torch.ones(8, device="fakegpu") * 2
        pinned = torch.empty(8, pin_memory=True)
        for read in (lambda: written + 1, lambda: pinned.copy_(written, non_blocking=True)):
            with pytest.raises(RuntimeError) as raised, other:
                read()
            assert "missing wait: " in str(raised.value)
            assert "reads a block of 32 bytes" in str(raised.value)
            assert "aten::mul writes on stream 0 of fakegpu:0" in str(raised.value)
        other.wait_event(torch.accelerator.current_stream().record_event())
        with other:
            assert (written + 1).sum().item() == 24
        assert control.counters()["missing_waits"] == 2


def test_stream_that_writes_waits_for_readers(gpu):
    @gpu.check
    def _():
        value = torch.ones(1 << 16, device="fakegpu")
        torch.accelerator.synchronize()
        other = torch.Stream("fakegpu")
        with other:
            value + 1
        with pytest.raises(RuntimeError) as raised:
            value.zero_()
        assert "aten::zero_ on stream 0 of fakegpu:0 writes" in str(raised.value)
        torch.accelerator.current_stream().wait_stream(other)
        value.zero_()


def test_block_freed_while_another_stream_uses_it_is_reported(gpu):
    """Inject a fault: `record_stream` is missing."""

    @gpu.check
    def _():
        def use(recorded):
            other = torch.Stream("fakegpu")
            value = torch.ones(8, device="fakegpu")
            other.wait_stream(torch.accelerator.current_stream())
            with other:
                value + 1
            if recorded:
                value.record_stream(other)

        use(recorded=True)
        torch.accelerator.synchronize()
        use(recorded=False)
        with pytest.raises(RuntimeError) as raised:
            torch.accelerator.synchronize()
        assert "was freed while aten::add uses it on stream" in str(raised.value)


def test_host_reads_wait_for_simulated_clock(gpu):
    @gpu.check
    def _():
        big = torch.ones(4 << 20, device="fakegpu")
        pinned = torch.zeros(4 << 20, pin_memory=True)
        assert [one.is_pinned() for one in (pinned, pinned[3:], torch.zeros(3))] == [True, True, False]
        pinned.copy_(big, non_blocking=True)
        done = torch.accelerator.current_stream().record_event()
        assert not done.query()
        assert pinned.sum() == 0
        done.synchronize()
        assert done.query()
        assert pinned.sum() == 4 << 20


def test_host_that_changes_memory_during_an_upload_is_reported(gpu):
    @gpu.check
    def _():
        pinned = torch.ones(4 << 20, pin_memory=True)
        there = torch.empty(4 << 20, device="fakegpu")
        there.copy_(pinned, non_blocking=True)
        pinned[5] = 2
        with pytest.raises(RuntimeError) as raised:
            torch.accelerator.synchronize()
        assert "changed 16777216 bytes of page-locked memory while an upload read them" in str(raised.value)


def test_page_locked_memory_is_reusable_in_stream_order(gpu):
    @gpu.check
    def _():
        pinned, there = torch.ones(1 << 20, pin_memory=True), torch.zeros(1 << 20, device="fakegpu")
        other = torch.full((1 << 20,), 3.0, device="fakegpu")
        there.copy_(pinned, non_blocking=True)
        pinned.copy_(other, non_blocking=True)
        there.copy_(pinned, non_blocking=True)
        torch.accelerator.synchronize()
        assert there.sum().item() == pinned.sum().item() == 3 << 20


def test_overlapping_downloads_keep_order_with_upload(gpu):
    @gpu.check
    def _():
        pinned, there = torch.zeros(1 << 20, pin_memory=True), torch.zeros(4, device="fakegpu")
        first, second = (torch.full((1 << 19,), value, device="fakegpu") for value in (1.0, 2.0))
        pinned[: 1 << 19].copy_(first, non_blocking=True)
        pinned[1 << 18 : 3 << 18].copy_(second, non_blocking=True)
        there.copy_(pinned[(3 << 18) - 4 : 3 << 18], non_blocking=True)
        torch.accelerator.synchronize()
        assert there.sum().item() == 8
        assert pinned.sum().item() == (1 << 18) + (2 << 19)


def test_changed_upload_is_reported_before_download(gpu):
    @gpu.check
    def _():
        pinned, there = torch.ones(1 << 20, pin_memory=True), torch.zeros(1 << 20, device="fakegpu")
        there.copy_(pinned, non_blocking=True)
        pinned[5] = 2
        pinned.copy_(there, non_blocking=True)
        there.copy_(pinned, non_blocking=True)
        with pytest.raises(RuntimeError, match="changed 4194304 bytes of page-locked memory while an upload read"):
            torch.accelerator.synchronize()
        torch.accelerator.synchronize()


def test_failed_download_leaves_result_unchanged(gpu):
    @gpu.check
    def _():
        pinned, there = torch.ones(1 << 20, pin_memory=True), torch.zeros(1 << 20, device="fakegpu")
        there.copy_(pinned, non_blocking=True)
        pinned[5] = 2
        result = torch.zeros(1 << 20)
        control.configure(issue=1.0)  # the upload ends during the next call, which reports the change
        with pytest.raises(RuntimeError, match="the host changed"):
            result.copy_(there)
        torch.accelerator.synchronize()
        assert result.sum().item() == 0


def test_event_times_are_simulated(gpu):
    @gpu.check
    def _():
        control.configure(bandwidth=1e12, flops=1e12, launch=1e-6)
        square = torch.ones(1000, 1000, device="fakegpu")
        begin, end = (torch.Event("fakegpu", enable_timing=True) for _ in range(2))
        begin.record()
        square @ square
        end.record()
        end.synchronize()
        assert abs(begin.elapsed_time(end) - 2.0) < 0.02, begin.elapsed_time(end)  # 2e9 operations


def test_uploads_overlap_with_compute(gpu):
    @gpu.check
    def _():
        control.configure(flops=1e12, link=25e9)
        square = torch.ones(512, 512, device="fakegpu")
        pinned = torch.empty(64 << 20, dtype=torch.uint8, pin_memory=True)
        uploads = torch.Stream("fakegpu")

        def seconds(compute, upload):
            torch.accelerator.synchronize()
            start = control.now()
            for _ in range(10 if compute else 0):
                square @ square
            with uploads:
                for _ in range(upload):
                    there = torch.empty(64 << 20, dtype=torch.uint8, device="fakegpu")
                    there.copy_(pinned, non_blocking=True)
            torch.accelerator.synchronize()
            return control.now() - start

        both, longer = seconds(True, 1), max(seconds(True, 0), seconds(False, 1))
        assert longer < both < 1.1 * longer, (both, longer)


def test_counters_count_launches_copies_and_waits(gpu):
    @gpu.check
    def _():
        pinned = torch.ones(1000, pin_memory=True)
        with control.Counted() as counted:
            there = pinned.to("fakegpu", non_blocking=True)
            there.mul_(2).add_(1)
            there.sum().item()
            pinned.copy_(there, non_blocking=True)
            there[there > 2]
        assert counted["launches"] == 6, counted  # mul, add, sum, gt, index and its `nonzero`
        assert counted["bytes_host_to_device"] == 4000
        assert counted["bytes_device_to_host"] == 4004
        assert counted["synchronizations"] == 2, counted
        assert counted["synchronizations of aten::nonzero"] == 1
        assert control.counters()["pinned_bytes_peak"] == 4096
