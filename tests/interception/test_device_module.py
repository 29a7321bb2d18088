"""`torch.remote_accelerator` and `torch.accelerator`: what programs ask of the module of an accelerator."""

from __future__ import annotations

import gc
import sys
import threading
import warnings

import pytest
import torch

import djinn

TYPE = "remote_accelerator"
MEGABYTE = 1 << 20
pytestmark = pytest.mark.usefixtures("embedded")
module = torch.remote_accelerator

# What programs may rely on, from `torch.cuda` and `torch.xpu`.
EXPECTED = """
    Event Stream StreamContext can_device_access_peer current_device current_stream default_generators default_stream device
    device_count device_of empty_cache get_amp_supported_dtype get_device_capability get_device_name get_device_properties
    get_rng_state get_rng_state_all init initial_seed is_available is_bf16_supported is_built is_current_stream_capturing
    is_initialized manual_seed manual_seed_all max_memory_allocated max_memory_reserved mem_get_info memory_allocated
    memory_reserved memory_stats memory_summary reset_accumulated_memory_stats reset_peak_memory_stats seed seed_all
    set_device set_rng_state set_rng_state_all set_stream stream synchronize
""".split()


def test_device_module_has_expected_names():
    assert [name for name in EXPECTED if not hasattr(module, name)] == []
    assert torch.get_device_module(TYPE) is torch.get_device_module() is module
    assert module.is_available()
    assert module.is_bf16_supported()
    assert not module.is_current_stream_capturing()
    assert module.get_amp_supported_dtype() == [torch.float16, torch.bfloat16]


def test_device_indexes_are_parsed_and_checked():
    assert (module.device_count(), module.current_device()) == (1, 0)
    module.set_device(f"{TYPE}:0")
    with module.device(0), module.device(-1), module.device(None), module.device_of(torch.ones(1, device=TYPE)):
        assert module.current_device() == 0
    with module.device_of(torch.ones(1)):
        pass
    for wrong in (1, f"{TYPE}:5"):
        with pytest.raises(RuntimeError, match="device_count"):
            module.set_device(wrong)
        with pytest.raises(RuntimeError, match="device_count"):
            module.device(wrong)
    with pytest.raises(ValueError, match=f"Expected a {TYPE} device"):
        module.synchronize("cpu")


def test_device_properties_describe_executor():
    properties = module.get_device_properties()
    assert properties.kind == "cpu"
    assert properties.name == module.get_device_name(0)
    assert properties.total_memory > 100 * MEGABYTE
    assert properties.multi_processor_count > 0
    assert module.get_device_capability() == (properties.major, properties.minor) == (0, 0)
    before = djinn.stats()["round_trips"]
    assert module.get_device_properties() is properties
    assert djinn.stats()["round_trips"] == before


def test_memory_allocated_counts_session_values():
    gc.collect()  # what earlier tests left in reference cycles is freed before the count begins, not within it
    base = module.memory_allocated()
    kept = torch.zeros(MEGABYTE, dtype=torch.uint8, device=TYPE)
    view = kept[10:]
    before = djinn.stats()["round_trips"]
    assert module.memory_allocated() == base + MEGABYTE
    assert djinn.stats()["round_trips"] == before + 1
    module.reset_peak_memory_stats()
    extra = torch.zeros(3 * MEGABYTE, dtype=torch.uint8, device=TYPE)
    module.synchronize()
    del extra
    assert module.memory_allocated() == module.memory_reserved() == base + MEGABYTE
    assert module.max_memory_allocated() == module.max_memory_reserved() == base + 4 * MEGABYTE
    stats = module.memory_stats()
    assert (stats["allocated_bytes.all.current"], stats["allocated_bytes.all.peak"]) == (
        base + MEGABYTE,
        base + 4 * MEGABYTE,
    )
    assert "allocated_bytes.all.peak" in module.memory_summary()
    module.reset_peak_memory_stats()
    assert module.max_memory_allocated() == base + MEGABYTE
    del kept
    assert module.memory_allocated() == base + MEGABYTE  # the view is there
    view.resize_(2 * MEGABYTE)
    del view
    module.empty_cache()
    assert module.memory_allocated() == base
    free, total = module.mem_get_info()
    assert 0 < free <= total


def test_memory_allocated_counts_all_threads():
    base = module.memory_allocated()
    kept = []
    thread = threading.Thread(target=lambda: kept.append(torch.zeros(MEGABYTE, dtype=torch.uint8, device=TYPE)))
    thread.start()
    thread.join()
    assert module.memory_allocated() == base + MEGABYTE


def test_torch_accelerator_is_this_device():
    accelerator = torch.accelerator
    kept = torch.zeros(MEGABYTE, dtype=torch.uint8, device=TYPE)
    assert str(accelerator.current_accelerator()) == TYPE
    assert (accelerator.device_count(), accelerator.current_device_index()) == (1, 0)
    assert accelerator.memory_allocated() == accelerator.memory_reserved() == module.memory_allocated() >= kept.nbytes
    assert accelerator.max_memory_allocated() == module.max_memory_allocated()
    assert accelerator.memory_stats()["allocated_bytes.all.current"] == module.memory_allocated()
    assert accelerator.get_memory_info()[1] == module.mem_get_info()[1]
    capability = accelerator.get_device_capability()
    assert {torch.float32, torch.bfloat16, torch.int64} <= capability["supported_dtypes"]
    accelerator.reset_peak_memory_stats()
    accelerator.reset_accumulated_memory_stats()
    accelerator.empty_cache()
    accelerator.empty_host_cache()
    accelerator.set_device_index(0)
    with accelerator.device_index(0):
        pass
    with pytest.raises(RuntimeError, match="device_count"):
        accelerator.set_device_index(3)


def test_synchronize_waits_and_raises():
    kept = torch.ones(2, device=TYPE)
    before = djinn.stats()["instructions_sent"]
    torch.accelerator.synchronize()
    assert djinn.stats()["instructions_sent"] > before
    del kept
    wrong = torch.zeros(2, device=TYPE)[torch.tensor([5], device=TYPE)]
    with pytest.raises(IndexError):
        torch.accelerator.synchronize()
    del wrong


def test_elapsed_time_is_measured_on_executor():
    a = torch.ones(400, 400, device=TYPE)
    events = [module.Event(enable_timing=True) for _ in range(3)]
    events[0].record()
    for _ in range(20):
        a = (a @ a) / 400
    events[1].record(module.current_stream())
    module.current_stream().record_event(events[2])
    events[2].synchronize()
    assert all(event.query() for event in events)
    whole, part = events[0].elapsed_time(events[2]), events[0].elapsed_time(events[1])
    assert whole >= part > events[1].elapsed_time(events[2]) >= 0
    assert events[1].elapsed_time(events[0]) == -part
    assert torch.equal(a.cpu(), torch.ones(400, 400))


def test_timed_ops_are_not_eliminated():
    a = torch.ones(4, 4, device=TYPE)
    module.synchronize()
    event = module.Event()
    before = djinn.stats()["instructions_sent"]
    for _ in range(5):
        _ = a @ a  # a benchmark's usual loop: the same again, never read
    event.record()
    event.synchronize()
    assert djinn.stats()["instructions_sent"] == before + 7


def test_invalid_event_use_raises():
    timed, plain = module.Event(enable_timing=True), module.Event()
    assert plain.query()
    plain.synchronize()
    plain.wait()
    with pytest.raises(ValueError, match="enable_timing=True"):
        plain.elapsed_time(timed)
    with pytest.raises(ValueError, match="recorded"):
        timed.elapsed_time(timed)
    with pytest.raises(djinn.errors.UnsupportedOperation, match="other processes"):
        module.Event(interprocess=True)


def test_event_orders_threads():
    event, target = module.Event(), torch.zeros(3, device=TYPE)

    def write():
        target.add_(1)
        event.record()

    thread = threading.Thread(target=write)
    thread.start()
    thread.join()
    before = djinn.stats()["submissions"]
    event.wait()
    assert djinn.stats()["submissions"] == before + 1  # what the other thread recorded
    assert event.query()
    assert target.tolist() == [1, 1, 1]


def test_streams_share_program_order():
    stream, other = module.Stream(), module.Stream(priority=-1)
    assert stream != other
    assert stream == torch.Stream(
        stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
    )
    assert module.current_stream() == module.default_stream() == torch.accelerator.current_stream()
    x = torch.ones(3, device=TYPE)
    with module.stream(stream):
        assert module.current_stream() == stream
        y = x + 1
        with other, module.stream(None):
            assert torch.accelerator.current_stream() == other
            other.wait_stream(stream)
            y.mul_(3)
            y.record_stream(other)
        assert module.current_stream() == stream
    assert module.current_stream() == module.default_stream()
    stream.wait_event(other.record_event())
    assert stream.query()
    stream.synchronize()
    assert y.tolist() == [6, 6, 6]
    seen = []
    with stream:
        thread = threading.Thread(target=lambda: seen.append(module.current_stream()))
        thread.start()
        thread.join()
    assert seen == [module.default_stream()]


def test_torch_stream_and_event_return_device_classes():
    for made in (torch.Stream(), torch.Stream(device=TYPE), torch.Stream(0)):
        assert isinstance(made, module.Stream)
        assert isinstance(made, torch.Stream)
        assert str(made.device) == f"{TYPE}:0"
    for event in (torch.Event(), torch.Event(TYPE, enable_timing=True), torch.Event(device=TYPE)):
        assert isinstance(event, module.Event)
        assert isinstance(event, torch.Event)
        assert event.device.type == TYPE
        event.record(torch.accelerator.current_stream())
        assert event.query()
    for other in (torch.Stream(device="cpu"), torch.Event(device="cpu")):
        assert isinstance(other, torch.Stream | torch.Event)
        assert other.device.type == "cpu"


def test_tensor_and_module_methods_named_after_device():
    x, layer = torch.ones(3), torch.nn.Linear(3, 3)
    assert x.remote_accelerator().is_remote_accelerator
    assert not x.is_remote_accelerator
    assert layer.remote_accelerator().weight.is_remote_accelerator
    packed = torch.nn.utils.rnn.pack_sequence([x])
    assert packed.remote_accelerator().is_remote_accelerator
    storage = x.untyped_storage()
    moved = storage.remote_accelerator()
    assert moved.is_remote_accelerator
    assert not storage.is_remote_accelerator
    assert moved.remote_accelerator() is moved
    assert torch.empty(0, device=TYPE).set_(moved).tolist() == [1, 1, 1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch says once in a process that such storages are deprecated
        assert x.to(TYPE).storage().is_remote_accelerator


def test_default_device_is_used_by_factories():
    torch.set_default_device(TYPE)
    try:
        assert torch.zeros(2).is_remote_accelerator
        assert torch.nn.Linear(2, 2).weight.is_remote_accelerator
        assert torch.Generator().device.type == "cpu"
        with torch.device("cpu"):
            assert not torch.zeros(2).is_remote_accelerator
    finally:
        torch.set_default_device(None)
    with torch.device(TYPE):
        assert torch.randperm(3).is_remote_accelerator
    assert not torch.zeros(2).is_remote_accelerator


def test_is_pinned_of_pinned_tensors():
    source = torch.arange(12.0).view(3, 4).t()
    assert not source.is_pinned()
    pinned = source.pin_memory()
    assert pinned.is_pinned()
    assert pinned[1:].is_pinned()
    assert pinned.pin_memory() is pinned
    assert pinned.stride() == source.stride()
    assert pinned.data_ptr() != source.data_ptr()
    remote = pinned.to(TYPE, non_blocking=True)
    pinned.zero_()
    assert torch.equal(remote.cpu(), source)
    assert not remote.is_pinned()
    with pytest.raises(RuntimeError, match="only dense CPU tensors can be pinned"):
        remote.pin_memory()
    assert not torch.arange(12.0).is_pinned()


def test_tensor_class_is_importable_from_its_module(embedded):
    opt_einsum = pytest.importorskip("opt_einsum")
    x = torch.arange(6.0, device=embedded).reshape(2, 3)
    assert getattr(sys.modules[type(x).__module__], type(x).__name__) is type(x)
    assert opt_einsum.contract("ij,kj->ik", x, x).tolist() == [[5, 14], [14, 50]]
