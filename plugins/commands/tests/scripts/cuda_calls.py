"""Calls of CUDA that programs use. Prints one line of JSON at the end: each failure by the name of its check."""

import copy
import io
import json
import pickle
import re
import sys
import threading
import traceback
import warnings

import torch
import torch.multiprocessing
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

CHECKS = {}


def check(function):
    CHECKS[function.__name__] = function
    return function


@check
def availability():
    assert torch.cuda.is_available()
    assert torch.cuda.device_count() == 1
    assert torch.cuda.current_device() == 0
    assert torch.cuda.is_initialized()
    assert torch.backends.cuda.is_built()
    assert torch.version.cuda.split(".")[0].isdigit()
    assert torch.get_device_module("cuda") is torch.cuda
    assert torch.cuda.is_bf16_supported()
    torch.cuda.init()


@check
def properties():
    properties = torch.cuda.get_device_properties(0)
    assert properties.name == torch.cuda.get_device_name() == torch.cuda.get_device_name("cuda:0")
    assert properties.total_memory > 2**20
    assert (properties.major, properties.minor) == torch.cuda.get_device_capability(torch.device("cuda"))
    assert properties.multi_processor_count >= 1


@check
def devices_are_named_as_asked():
    for device in ("cuda", "cuda:0", torch.device("cuda"), torch.device("cuda", 0), 0):
        x = torch.ones(2, device=device)
        assert str(x.device) == "cuda:0"
        assert x.device == torch.device("cuda:0") == torch.device("cuda", 0)
        assert x.device.type == "cuda" and x.is_cuda and x.get_device() == 0 and not x.is_cpu
        assert "device='cuda:0'" in repr(x)
        assert x.sum().item() == 2
        y = torch.ones(2).to(device)
        assert y.is_cuda
        assert y.to(device) is y and y.cuda() is y and y.to("cuda:0", torch.float32) is y


@check
def moving():
    x = torch.arange(4.0)
    for moved in (x.cuda(), x.cuda(0), x.cuda("cuda:0"), x.cuda(device=0, non_blocking=True), x.to(device="cuda")):
        assert moved.is_cuda and torch.equal(moved.cpu(), x)
    assert x.to("cuda", torch.float16, non_blocking=True).dtype is torch.float16
    on_device = x.cuda()
    assert x.to(on_device).is_cuda and on_device.to(x).device.type == "cpu"
    assert torch.as_tensor([1, 2], device="cuda").is_cuda and torch.tensor(3.0, device="cuda").item() == 3
    assert on_device.new_zeros(2).is_cuda and on_device.new_tensor([1.0]).is_cuda
    assert torch.zeros_like(x, device="cuda").is_cuda and not torch.zeros_like(on_device, device="cpu").is_cuda
    assert torch.empty_like(on_device).device == on_device.device


@check
def factories():
    for made in (
        torch.zeros(2, 3, device="cuda"),
        torch.full((2,), 1.5, device="cuda"),
        torch.arange(5, device="cuda"),
        torch.linspace(0, 1, 5, device="cuda"),
        torch.eye(3, device="cuda"),
        torch.randn(3, device="cuda"),
        torch.randint(0, 9, (3,), device="cuda"),
        torch.randperm(5, device="cuda"),
        torch.empty_strided((2, 2), (2, 1), device="cuda"),
        torch.tril_indices(3, 3, device="cuda"),
        torch.from_numpy(__import__("numpy").ones(3)).cuda(),
    ):
        assert made.is_cuda
    assert torch.arange(5, device="cuda").tolist() == list(range(5))


@check
def mixing_with_the_cpu_is_refused():
    try:
        torch.ones(2, device="cuda") + torch.ones(2)
    except RuntimeError as error:
        assert "cuda:0 and cpu" in str(error), error
    else:
        raise AssertionError


@check
def there_is_no_second_device():
    for make in (
        lambda: torch.ones(1, device="cuda:1"),
        lambda: torch.ones(1).to("cuda:1"),
        lambda: torch.ones(1).cuda(1),
    ):
        try:
            make()
        except RuntimeError as error:
            assert "device_count() is 1" in str(error), error
        else:
            raise AssertionError


@check
def numpy_needs_the_cpu():
    try:
        torch.ones(1, device="cuda").numpy()
    except TypeError as error:
        assert re.match(r"can't convert (a )?cuda:0 .*tensor to numpy. Use Tensor.cpu\(\)", str(error)), error
    else:
        raise AssertionError


@check
def modules_keep_their_parameters():
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    before = list(model.parameters())
    model.cuda().to("cuda:0").to(0)
    assert all(a is b for a, b in zip(before, model.parameters())) and model.weight.is_cuda
    model(torch.ones(4, 3, device=model.weight.device)).sum().backward()
    assert model.weight.grad.device == torch.device("cuda:0")
    optimizer.step()
    assert model.cpu().weight.device.type == "cpu" and model.weight.is_leaf


@check
def recurrent_and_attention():
    out, _ = nn.LSTM(3, 4, num_layers=2).cuda()(torch.ones(5, 2, 3).cuda())
    out.sum().backward()
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).cuda()
    assert layer(torch.ones(2, 3, 8, device="cuda")).is_cuda
    layer.eval()
    with torch.no_grad():
        assert layer(torch.ones(2, 3, 8, device="cuda")).is_cuda


@check
def autocast():
    linear, x = nn.Linear(4, 4).cuda(), torch.ones(2, 4, device="cuda")
    for context in (torch.autocast("cuda"), torch.autocast(device_type="cuda"), torch.cuda.amp.autocast()):
        with context:
            assert torch.is_autocast_enabled() and torch.is_autocast_enabled("cuda")
            assert torch.get_autocast_dtype("cuda") is torch.get_autocast_gpu_dtype() is torch.float16
            assert linear(x).dtype is torch.float16 and linear(x).softmax(-1).dtype is torch.float32
            with torch.autocast("cuda", enabled=False):
                assert linear(x).dtype is torch.float32
    assert not torch.is_autocast_enabled()
    with torch.amp.autocast("cuda", dtype=torch.bfloat16):
        assert linear(x).dtype is torch.bfloat16


@check
def grad_scalers():
    for scaler in (torch.amp.GradScaler("cuda"), torch.cuda.amp.GradScaler(), torch.amp.GradScaler()):
        assert scaler.is_enabled()
        w = torch.ones(2, device="cuda", requires_grad=True)
        optimizer = torch.optim.SGD([w], 0.5)
        scaler.scale((w * 2).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert w.tolist() == [0.0, 0.0] and scaler.get_scale() == 65536
        w.grad.fill_(float("inf"))
        scaler.scale(torch.zeros((), device="cuda"))
        scaler.step(optimizer)
        scaler.update()
        assert w.tolist() == [0.0, 0.0] and scaler.get_scale() == 32768


class Square(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.float32)
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")
    def backward(ctx, grad):
        return 2 * grad * ctx.saved_tensors[0]


@check
def custom_functions_and_checkpointing():
    from torch.utils.checkpoint import checkpoint

    x = torch.full((2,), 3.0, device="cuda", requires_grad=True)
    with torch.autocast("cuda", dtype=torch.float16):
        Square.apply(x.half()).sum().backward()
    assert x.grad.tolist() == [6.0, 6.0]
    dropout = nn.Dropout(0.5)
    y = torch.ones(64, device="cuda", requires_grad=True)
    out = checkpoint(lambda t: dropout(t) * 1.0, y, use_reentrant=False)
    out.sum().backward()
    assert torch.equal(out, y.grad)


@check
def seeds():
    def draw():
        return torch.rand(3, device="cuda").tolist()

    torch.manual_seed(5)
    first = draw()
    torch.cuda.manual_seed(5)
    assert draw() == first
    torch.cuda.manual_seed_all(5)
    state = torch.cuda.get_rng_state()
    assert draw() == first
    torch.cuda.set_rng_state(state)
    assert draw() == first
    torch.cuda.set_rng_state_all([state])
    assert draw() == first
    with torch.random.fork_rng(devices=[0], device_type="cuda"):
        before = draw()
    assert draw() == before != first
    assert torch.cuda.initial_seed() == 5
    torch.cuda.seed()
    torch.cuda.seed_all()


@check
def generators():
    generator = torch.Generator(device="cuda").manual_seed(3)
    assert generator.device == torch.device("cuda:0") and isinstance(generator, torch.Generator)
    first = torch.randn(3, device="cuda", generator=generator)
    state = generator.get_state()
    assert torch.equal(torch.randn(3, device="cuda", generator=generator.manual_seed(3)), first)
    assert generator.get_state().equal(state)


@check
def memory():
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    x = torch.zeros(2**18, device="cuda")
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - before >= 2**20
    assert torch.cuda.max_memory_allocated("cuda:0") >= before + 2**20
    assert torch.cuda.memory_reserved(0) >= torch.cuda.memory_allocated(0) and torch.cuda.max_memory_reserved() > 0
    del x
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() < before + 2**20 <= torch.cuda.max_memory_allocated()
    free, total = torch.cuda.mem_get_info()
    assert 0 < free <= total
    assert "allocated" in torch.cuda.memory_summary().lower()
    assert torch.cuda.memory_stats()["allocated_bytes.all.current"] == torch.cuda.memory_allocated()
    torch.cuda.memory.reset_peak_memory_stats()
    torch.cuda.ipc_collect()
    assert issubclass(torch.cuda.OutOfMemoryError, RuntimeError)


@check
def streams_and_events():
    stream = torch.cuda.Stream()
    assert torch.cuda.current_stream() == torch.cuda.default_stream() != stream
    assert isinstance(torch.cuda.current_stream(), torch.cuda.Stream)
    assert stream.device == torch.device("cuda:0") == torch.cuda.Event().device
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with torch.cuda.stream(stream):
        assert torch.cuda.current_stream() == stream
        start.record()
        x = torch.ones(64, 64, device="cuda")
        for _ in range(10):
            x = x @ x / 64
        end.record(stream)
    torch.cuda.current_stream().wait_stream(stream)
    x.record_stream(torch.cuda.current_stream())
    end.synchronize()
    assert end.query() and start.elapsed_time(end) > 0 and x.mean().item() == 1
    torch.cuda.current_stream().synchronize()
    with torch.cuda.device(0), torch.cuda.device_of(x):
        assert torch.cuda.current_device() == 0


@check
def switches_of_backends():
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.enabled = True
    torch.backends.cudnn.allow_tf32 = True
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.set_float32_matmul_precision("high")
    torch.backends.cuda.enable_flash_sdp(True)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        pass
    torch.set_float32_matmul_precision("highest")


@check
def marks_and_graphs():
    assert torch.cuda.nvtx.range_push("a") == 0 and torch.cuda.nvtx.range_pop() == 0
    with torch.cuda.nvtx.range("b {}", 1):
        torch.cuda.nvtx.mark("c")
    torch.cuda.nvtx.range_end(torch.cuda.nvtx.range_start("d"))
    torch.cuda.check_error(torch.cuda.cudart().cudaProfilerStart())
    torch.cuda.profiler.start()
    torch.cuda.profiler.stop()
    assert not torch.cuda.is_current_stream_capturing()
    model = nn.Linear(2, 2).cuda()
    assert torch.cuda.make_graphed_callables(model, (torch.ones(1, 2, device="cuda"),)) is model
    for call in (
        torch.cuda.CUDAGraph,
        torch.cuda.graph_pool_handle,
        torch.cuda.temperature,
        torch.cuda.memory_snapshot,
    ):
        try:
            call()
        except NotImplementedError as error:
            assert "djinn run" in str(error), error
        else:
            raise AssertionError(call)


@check
def profilers():
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, record_shapes=True) as profile:
        with torch.profiler.record_function("step"):
            torch.ones(3, device="cuda").mul(2)
    assert "step" in profile.key_averages().table(sort_by="cuda_time_total", row_limit=10)
    assert not hasattr(torch.ones(1, device="cuda"), "__cuda_array_interface__")


@check
def legacy_types():
    x = torch.cuda.FloatTensor(2, 3).fill_(1)
    assert x.is_cuda and x.shape == (2, 3) and isinstance(x, torch.cuda.FloatTensor)
    assert not isinstance(x, torch.cuda.LongTensor) and not isinstance(torch.ones(1), torch.cuda.FloatTensor)
    assert torch.cuda.LongTensor([1, 2]).tolist() == [1, 2] and torch.cuda.FloatTensor().numel() == 0
    assert x.type() == "torch.cuda.FloatTensor" and x.type("torch.cuda.HalfTensor").dtype is torch.float16
    assert torch.ones(2).type(torch.cuda.DoubleTensor).type() == "torch.cuda.DoubleTensor"
    assert x.type(torch.float64).is_cuda and x.type(torch.FloatTensor).device.type == "cpu"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.set_default_tensor_type("torch.cuda.FloatTensor")
        assert torch.zeros(2).is_cuda
        torch.set_default_tensor_type(torch.FloatTensor)
        assert not torch.zeros(2).is_cuda


@check
def default_devices():
    torch.set_default_device("cuda")
    try:
        assert torch.zeros(2).is_cuda and nn.Linear(2, 2).weight.is_cuda
    finally:
        torch.set_default_device("cpu")
    with torch.device("cuda"):
        assert torch.ones(1).is_cuda
    assert not torch.ones(1).is_cuda


@check
def saving_and_loading():
    x = torch.arange(3.0, device="cuda")
    saved = io.BytesIO()
    torch.save({"x": x, "w": nn.Parameter(x)}, saved)
    for location, device in ((None, "cuda:0"), ("cuda", "cuda:0"), ("cuda:0", "cuda:0"), ("cpu", "cpu")):
        for place in (location, torch.device(location) if location else None):
            saved.seek(0)
            loaded = torch.load(saved, map_location=place)
            assert str(loaded["x"].device) == str(loaded["w"].device) == device, (place, loaded["x"].device)
            assert loaded["x"].tolist() == [0, 1, 2]
    saved.seek(0)
    assert torch.load(saved, map_location=lambda storage, _: storage)["x"].device.type == "cpu"
    saved.seek(0)
    assert torch.load(saved, map_location=lambda storage, _: storage.cuda(0))["x"].is_cuda
    saved.seek(0)
    assert torch.load(saved, map_location={"cuda:0": "cpu"})["x"].device.type == "cpu"
    assert pickle.loads(pickle.dumps(x)).is_cuda and copy.deepcopy(x).is_cuda
    assert pickle.loads(pickle.dumps(x.device)) == x.device


@check
def pinned_memory():
    x = torch.ones(3).pin_memory()
    assert x.is_pinned() and x.cuda(non_blocking=True).is_cuda
    assert torch.zeros(3, pin_memory=True).tolist() == [0, 0, 0]
    batches = DataLoader(TensorDataset(torch.arange(4.0)), 2, pin_memory=True, num_workers=1)
    assert [b.cuda(non_blocking=True).sum().item() for (b,) in batches] == [1, 5]


@torch.jit.script
def scripted(n: int) -> torch.Tensor:
    return torch.zeros(n) + torch.ones([n], dtype=torch.float32)


@check
def factories_can_be_scripted():
    assert scripted(2).tolist() == [1, 1]


@check
def data_parallel_of_one():
    model = nn.DataParallel(nn.Linear(2, 2)).cuda()
    out = model(torch.ones(3, 2))
    assert out.is_cuda and model.module.weight.is_cuda
    out.sum().backward()
    assert nn.DataParallel(nn.Linear(2, 2).cuda(), device_ids=[0])(torch.ones(3, 2).cuda()).is_cuda


@check
def distributed_is_refused():
    for arguments in ({"backend": "nccl"}, {}):
        try:
            torch.distributed.init_process_group(**arguments, init_method="tcp://127.0.0.1:1", rank=0, world_size=1)
        except NotImplementedError as error:
            assert "torchrun" in str(error), error
        else:
            raise AssertionError


@check
def threads():
    found = []
    thread = threading.Thread(target=lambda: found.append(torch.ones(2).cuda().sum().item()))
    thread.start()
    thread.join()
    assert found == [2]


def in_a_child(queue):
    queue.put((torch.cuda.is_available(), str(torch.ones(2, device="cuda").device), torch.ones(2).cuda().sum().item()))


@check
def spawned_processes():
    context = torch.multiprocessing.get_context("spawn")
    queue = context.Queue()
    child = context.Process(target=in_a_child, args=(queue,))
    child.start()
    assert queue.get(timeout=90) == (True, "cuda:0", 2)
    child.join()
    assert child.exitcode == 0


@check
def compiled():
    model = torch.compile(nn.Linear(3, 3).cuda(), backend="eager")
    assert model(torch.ones(2, 3, device="cuda")).is_cuda


if __name__ == "__main__":
    wrong = {}
    for name, function in CHECKS.items():
        if sys.argv[1:] and name not in sys.argv[1:]:
            continue
        try:
            function()
        except Exception:
            wrong[name] = traceback.format_exc(limit=-3)
    print(json.dumps({"checked": len(CHECKS), "wrong": wrong}))
