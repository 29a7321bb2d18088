"""Parts of `make test-gpu`: each tests one feature on a server with the device, and returns findings.

A part raises on a fault, and raises `NotRun` if it cannot run here. Programs run on the device directly and through
Djinn on an executor with the same device, and are compared. `run_gpu.py` starts each part in a separate process:

    python -m evaluation.gpu.parts PART --device cuda:0 --to FILE
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from torch import nn

import djinn
from djinn.testing import executor_figures, executor_processes
from evaluation import ROOT
from evaluation.gpu.part_process import Found, NotRun, needs_gpu, run_part
from evaluation.zoo.serving import serving

REMOTE = "remote_accelerator:0"
MIB = 1 << 20
COMPILING_SECONDS = 240.0
TOLD = re.compile("a template is compiled|a template runs uncompiled|a compiled template is not used|a compiler failed")

# --- programs -----------------------------------------------------------------------------------------------------------


def fetched(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().cpu() for name, tensor in tensors.items()}


def train(device: str, steps: int = 5) -> dict[str, torch.Tensor]:
    """Train a convolutional net with Adam, without dropout."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten())
    model.append(nn.Linear(256, 10))
    inputs, labels = torch.randn(16, 3, 32, 32).to(device), torch.arange(16).remainder(10).to(device)
    model.to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(steps):
        loss = nn.functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return fetched({"loss": loss} | dict(model.state_dict()))


def gpt2(device: str, **config: object) -> nn.Module:
    """Return GPT-2 with random weights."""
    try:
        from transformers import GPT2Config, GPT2LMHeadModel
    except ImportError:
        raise NotRun("transformers is not installed") from None
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(**config)).eval().to(device)


def generate(device: str) -> dict[str, torch.Tensor]:
    """Generate 24 tokens greedily."""
    model = gpt2(device, n_layer=4, n_embd=256, n_head=4, vocab_size=2000)
    inputs = torch.arange(1, 17)[None].to(device)
    return fetched({"tokens": model.generate(inputs, max_new_tokens=24, do_sample=False, pad_token_id=0)})


def sample(device: str) -> dict[str, torch.Tensor]:
    """Draw random numbers from a seed and from a generator."""
    torch.manual_seed(3)
    generator = torch.Generator(device=device).manual_seed(4)
    return fetched({
        "rand": torch.rand(1000, device=device),
        "randn": torch.randn(1000, device=device),
        "generator": torch.rand(1000, device=device, generator=generator),
        "dropout": nn.functional.dropout(torch.ones(1000, device=device)),
    })  # fmt: skip


def half(device: str) -> dict[str, torch.Tensor]:
    """Run attention and products under autocast, forward and backward."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, dropout=0.0, batch_first=True).to(device)
    inputs = torch.randn(4, 32, 64).to(device)
    with torch.autocast(torch.device(device).type, dtype=torch.bfloat16):
        out = layer(inputs)
        loss = out.float().square().mean()
    loss.backward()
    return fetched({"out": out, "loss": loss} | {n: p.grad for n, p in layer.named_parameters()})


def compared(program: Callable[[str], dict[str, torch.Tensor]], device: str) -> Found:
    """Compare the results of a program on the local device and through Djinn.

    Raises:
        AssertionError: a result is not within PyTorch's tolerances.
    """
    here = "cpu" if device.startswith("fakegpu") else device  # a process can have only one PrivateUse1 device
    expected, actual = program(here), program(REMOTE)
    assert expected.keys() == actual.keys()
    bitwise = sum(torch.equal(expected[name], actual[name]) for name in expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, msg=lambda text, name=name: f"{name}: {text}")
    return {"results": len(expected), "bitwise equal": bitwise}


def raised(run: Callable[[], object]) -> Exception:
    """Return the exception that a call raises.

    Raises:
        AssertionError: the call raised none.
    """
    try:
        run()
    except Exception as error:
        return error
    raise AssertionError("no exception was raised")


def still_works() -> None:
    """Compute a value and check it."""
    assert (torch.ones(8, device=REMOTE) + 1).sum().item() == 16


# --- parts --------------------------------------------------------------------------------------------------------------


def devices(device: str) -> Found:
    """Report the device's name, memory and PyTorch version as the client sees them; run `djinn doctor`."""
    with serving(device=device) as file:
        properties = torch.get_device_module(REMOTE).get_device_properties(REMOTE)
        environment = os.environ | {"DJINN_CONNECTION_FILE": str(file)}
        command = [sys.executable, "-m", "djinn_core.cli", "doctor", "--json"]
        status = subprocess.run([*command[:-2], "status", "--json"], check=False, env=environment, capture_output=True)
        assert status.returncode == 0, status.stderr
        doctor = json.loads(subprocess.run(command, check=False, env=environment, capture_output=True).stdout)
        assert doctor["well"], [finding["what"] for finding in doctor["findings"]]
        assert properties.total_memory > 0, properties
        return {
            name: getattr(properties, name)
            for name in ("name", "kind", "total_memory", "multi_processor_count", "major")
        }


def training(device: str) -> Found:
    """Compare a training run."""
    with serving(device=device):
        return compared(train, device)


def generation(device: str) -> Found:
    """Compare greedy decoding with a growing KV cache."""
    with serving(device=device):
        return compared(generate, device)


def randomness(device: str) -> Found:
    """Compare random numbers from a seed."""
    with serving(device=device):
        return compared(sample, device)


def autocast(device: str) -> Found:
    """Compare bfloat16 under autocast."""
    with serving(device=device):
        return compared(half, device)


def numeric_settings(device: str) -> Found:
    """Compare results under `set_float32_matmul_precision` and deterministic algorithms."""

    def product(where: str) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        left, right = torch.randn(512, 512).to(where), torch.randn(512, 512).to(where)
        return fetched({"product": left @ right})

    results: Found = {}
    with serving(device=device):
        for precision in ("highest", "high", "medium"):
            torch.set_float32_matmul_precision(precision)
            results[precision] = compared(product, device)["bitwise equal"]
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.benchmark = True
        results["cudnn.benchmark"] = compared(train, device)["bitwise equal"]
        torch.backends.cudnn.benchmark = False
        torch.use_deterministic_algorithms(True)
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        results["deterministic"] = compared(product, device)["bitwise equal"]
    return results


def streams(device: str) -> Found:
    """Test streams and events: order, waits, times."""
    with serving(device=device):
        module = torch.get_device_module(REMOTE)
        side, start, end = module.Stream(), module.Event(enable_timing=True), module.Event(enable_timing=True)
        x = torch.ones(1000, 1000, device=REMOTE)
        start.record()
        with module.stream(side):
            y = x * 2
            event = side.record_event()
        module.current_stream().wait_event(event)
        total = (x + y).sum()
        end.record()
        module.synchronize()
        assert total.item() == 3_000_000
        assert end.query()
        return {"elapsed ms": round(start.elapsed_time(end), 3)}


def copies(device: str) -> Found:
    """Copy a tensor of 256 MiB both ways, pinned and not, and compare the bytes."""
    data = torch.randint(0, 255, (256 * MIB,), dtype=torch.uint8)
    results: Found = {}
    with serving(device=device):
        for name, inputs in (("pageable", data), ("pinned", data.pin_memory(REMOTE))):
            start = time.perf_counter()
            there = inputs.to(REMOTE, non_blocking=True)
            djinn.synchronize()
            between = time.perf_counter()
            back = there.cpu()
            end = time.perf_counter()
            assert torch.equal(back, data)
            results[f"{name}: up GB/s"] = round(data.numel() / (between - start) / 1e9, 2)
            results[f"{name}: down GB/s"] = round(data.numel() / (end - between) / 1e9, 2)
    return results


def memory_figures(device: str) -> Found:
    """Test `memory_allocated` and similar functions: they follow allocations and frees, and the peak stays."""
    with serving(device=device):
        module = torch.get_device_module(REMOTE)
        before = module.memory_allocated()
        module.reset_peak_memory_stats()
        references = torch.ones(64 * MIB, dtype=torch.uint8, device=REMOTE)
        djinn.synchronize()
        during = module.memory_allocated()
        assert during >= before + references.numel(), (before, during)
        del references
        djinn.synchronize()
        after, peak = module.memory_allocated(), module.max_memory_allocated()
        assert after < during, (during, after)
        assert peak >= during, (peak, during)
        free, total = module.mem_get_info()
        assert 0 < free <= total
        return {"before": before, "during": during, "after": after, "peak": peak, "free": free, "total": total}


def out_of_memory(device: str) -> Found:
    """Test that an impossible allocation raises `torch.OutOfMemoryError` as locally, and the session continues."""
    with serving(device=device):
        witness = torch.arange(1000, device=REMOTE)
        local, error = (
            raised(lambda d=d: torch.empty(1 << 50, dtype=torch.uint8, device=d)[:4].cpu()) for d in (device, REMOTE)
        )
        assert isinstance(error, type(local)), f"{type(error).__name__} in place of {type(local).__name__}: {error}"
        still_works()
        assert witness.sum().item() == 499_500
        return {"said": f"{type(error).__name__}: {error}"[:600]}


def filling(device: str) -> Found:
    """Fill the device in steps, and test that contents stay right and freed memory is usable."""
    needs_gpu(device, "limits of the device's own memory")
    with serving(device=device):
        free, _ = torch.get_device_module(REMOTE).mem_get_info()
        piece, references = max(free // 16, 64 * MIB), []
        error: Exception | None = None
        for number in range(24):
            try:
                references.append(torch.full((piece // 4,), float(number), device=REMOTE))
                assert references[-1][-1].item() == number
            except Exception as caught:
                error = caught
                break
        assert isinstance(error, torch.OutOfMemoryError), repr(error)
        count = len(references) - 1
        assert all(tensor[0].item() == number for number, tensor in enumerate(references[:count]))
        references.clear()
        again = torch.full((piece // 4,), 1.0, device=REMOTE)
        assert again[-1].item() == 1
        return {"pieces": count, "MiB each": piece // MIB, "said": str(error)[:600]}


def asserts(device: str) -> Found:
    """Trigger an index out of range in a kernel. Check the op's error, and what this and another session can do afterwards."""
    with serving(device=device) as file:
        rows = torch.arange(40.0, device=REMOTE).reshape(10, 4)
        wrong = torch.tensor([3, 99], device=REMOTE)
        error = raised(lambda: nn.functional.embedding(wrong, rows).sum().item())
        results: Found = {"said": f"{type(error).__name__}: {error}"[:800]}
        try:
            still_works()
            results["the same session"] = "goes on"
        except Exception as after:
            results["the same session"] = f"{type(after).__name__}: {after}"[:800]
        code = "import torch, djinn; print((torch.ones(8, device='remote_accelerator:0') + 1).sum().item())"
        environment = os.environ | {"DJINN_CONNECTION_FILE": str(file)}
        command = [sys.executable, "-c", code]
        process = subprocess.run(command, check=False, capture_output=True, text=True, env=environment, timeout=240)
        results["a new session"] = "works" if process.stdout.strip() == "16.0" else process.stderr[-800:]
        assert results["a new session"] == "works", results
    return results


def accelerated(device: str, figure: str, *options: str) -> Found:
    """Test that a hot model that the server compiles or records gives equal results.

    `figure`: name of the executor's figure that counts such templates. `options`: of the server.
    """
    torch.manual_seed(0)
    model = nn.Sequential(
        *[layer for _ in range(8) for layer in (nn.Linear(256, 256), nn.GELU(), nn.LayerNorm(256))]
    ).eval()
    inputs = torch.randn(32, 256)
    with serving(*options, device=device) as file, torch.no_grad():
        expected = model.to(device)(inputs.to(device)).cpu()
        model, there, runs = model.to(REMOTE), inputs.to(REMOTE), 0
        figures: Mapping[str, int] = {}
        text: list[str] = []
        deadline = time.monotonic() + COMPILING_SECONDS
        while time.monotonic() < deadline:
            for _ in range(40):
                result = model(there).cpu()
                runs += 1
            torch.testing.assert_close(result, expected)
            figures = executor_figures()
            text = [line for line in file.with_name("log").read_text().splitlines() if TOLD.search(line)]
            if figures[figure]:
                break
        if not text and figures.get("compiling_templates"):
            raise NotRun(f"after {COMPILING_SECONDS:.0f} s it is still being compiled, by a process of low priority")
        assert text, f"nothing was compiled within {COMPILING_SECONDS:.0f} s, in {runs} runs"
        return {"runs": runs, figure: figures[figure], "server said": text[-3:]}


def inductor(device: str) -> Found:
    """Test `djinn serve --compile inductor`."""
    return accelerated(device, "compiled_templates", "--compile", "inductor")


def graphs(device: str) -> Found:
    """Test `djinn serve --graphs`."""
    if device == "cpu":
        raise NotRun("a CPU records no graphs")
    return accelerated(device, "recorded_templates", "--graphs")


def tensorrt(device: str) -> Found:
    """Test `djinn serve --compile tensorrt`."""
    needs_gpu(device, "TensorRT's engines")
    try:
        import torch_tensorrt  # noqa: F401 - asked for, to know if it works here
    except Exception as error:
        raise NotRun(f"torch-tensorrt cannot be imported: {error}") from None
    return accelerated(device, "compiled_templates", "--compile", "tensorrt")


def spill(device: str) -> Found:
    """Test values of three times the memory limit: spilled, restored, unchanged."""
    with serving("--memory-gib", "0.25", device=device):
        references = [torch.full((16 * MIB,), float(number), device=REMOTE) for number in range(12)]
        for number, tensor in enumerate(references):
            assert tensor[::4096].eq(number).all().item()
        figures = executor_figures()
        assert figures["spilled_bytes"] > 0, figures
        return {name: figures[name] for name in ("evictions", "spilled_bytes", "restored_bytes")}


def idle(device: str) -> Found:
    """Test an idle session: its values move to host memory and back."""
    with serving("--idle-minutes", "0.05", device=device):
        references = torch.arange(16.0 * MIB, device=REMOTE)
        before = references[-1].item()
        time.sleep(20)
        figures = executor_figures()
        assert references[-1].item() == before
        return {name: value for name, value in figures.items() if name.startswith("idle") or name == "memory_away"}


def ray(device: str) -> Found:
    """Test an executor on a local Ray cluster."""
    try:
        import ray as _  # noqa: F401 - asked for, to know if it works here
    except ImportError:
        raise NotRun(
            "Ray is not installed: `python -m evaluation ray`, then `.venv-ray/bin/python -m evaluation gpu --only ray`"
        ) from None
    with serving("--engine", "ray", device=device):
        return compared(train, device)


def weights(device: str) -> Found:
    """Compare weights that the server reads from a file with local ones."""
    try:
        from safetensors.torch import save_file
    except ImportError:
        raise NotRun("safetensors is not installed") from None
    state = {"weight": torch.randn(512, 512), "half": torch.randn(64).half()}
    with tempfile.TemporaryDirectory() as folder:
        save_file(state, Path(folder, "model.safetensors"))
        with serving("--models", folder, device=device):
            read = djinn.open_weights(f"file://{folder}/model.safetensors")
            for name, tensor in state.items():
                assert torch.equal(read[name].cpu(), tensor), name
    return {"tensors": len(state)}


def cuda_names(device: str) -> Found:
    """Run a CUDA script with `djinn run`."""
    with serving(device=device) as file:
        environment = os.environ | {"DJINN_CONNECTION_FILE": str(file)}
        command = [sys.executable, "-m", "djinn_core.cli", "run", str(ROOT / "examples" / "cuda_matmul.py")]
        process = subprocess.run(command, check=False, capture_output=True, text=True, env=environment, timeout=240)
        assert process.returncode == 0, process.stderr[-2000:]
        return {"said": process.stdout[-400:]}


def two_clients(device: str) -> Found:
    """Run two programs on one device concurrently; results equal those of separate runs."""
    code = (
        "import torch\n"
        "from evaluation.gpu import parts\n"
        "found = parts.train('remote_accelerator:0', steps=20)\n"
        "print(found['loss'].item())\n"
    )
    with serving(device=device) as file:
        environment = os.environ | {"DJINN_CONNECTION_FILE": str(file)}
        expected = train(REMOTE, steps=20)["loss"].item()
        clients = [
            subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment)
            for _ in range(2)
        ]
        losses = [float(process.communicate(timeout=240)[0]) for process in clients]
        assert losses == [expected, expected], (losses, expected)
        return {"loss": expected}


def crash(device: str) -> Found:
    """Kill the executor during a session: the session continues, or the error names the loss."""
    with serving(device=device):
        x = torch.arange(1000.0, device=REMOTE)
        assert x.sum().item() == 499_500
        os.kill(executor_processes()[0], 9)
        start = time.monotonic()
        try:
            assert (x * 2).sum().item() == 999_000
            ending = "went on"
        except djinn.errors.SessionLost as error:
            ending = f"lost: {error}"[:400]
            djinn.shut_down()
            still_works()
        return {"session": ending, "seconds": round(time.monotonic() - start, 1)}


def calibration(device: str) -> Found:
    """Run `djinn calibrate --quick`."""
    with serving(device=device) as file:
        environment = os.environ | {"DJINN_CONNECTION_FILE": str(file)}
        command = [sys.executable, "-m", "djinn_core.cli", "calibrate", "--quick", "--json"]
        process = subprocess.run(command, check=False, capture_output=True, text=True, env=environment, timeout=540)
        assert process.returncode == 0, process.stderr[-2000:]
        return {"measured": json.loads(process.stdout)}


def demo(device: str) -> Found:
    """Run `djinn demo`: results equal those of the local CPU."""
    command = [sys.executable, "-m", "djinn_core.cli", "demo", "--device", device, "--json"]
    process = subprocess.run(command, check=False, capture_output=True, text=True)
    assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-2000:]
    return {"programs": json.loads(process.stdout)}


def databases(device: str) -> Found:
    """Compare two samples of each entry of PyTorch's op database."""
    with tempfile.TemporaryDirectory() as folder, serving(device=device) as file:
        to, environment = (
            Path(folder, "found"),
            os.environ | {"DJINN_CONNECTION_FILE": str(file), "OMP_NUM_THREADS": "1"},
        )
        options = ["--only", "op_db forward", "--samples", "2", "--local", device, "--json", to]
        subprocess.run(
            [sys.executable, "-W", "ignore", "-m", "evaluation.conformance.run_databases", *options],
            check=False,
            env=environment,
        )
        report = json.loads(to.read_text())
    (row,) = report["rows"]
    failures = [f"{entry['name']}: {entry['reason']}"[:200] for entry in report["failed"]]
    assert not failures, f"{row}: {'; '.join(failures)}"
    return row


def two_gpus(device: str) -> Found:
    """Use all GPUs as one device: run a program over two GPUs, and move a tensor between them."""
    needs_gpu(device, "two GPUs")
    if torch.cuda.device_count() < 2:
        raise NotRun("there is one GPU")
    with serving("--device", "cuda:1", device="cuda:0"):
        djinn.configure(executors=2)
        djinn.init()
        first = torch.arange(1000.0, device="remote_accelerator:1")
        assert first.to("remote_accelerator:2").sum().item() == 499_500
        return compared(train, device)


def times(device: str) -> Found:
    """Measure times: the device locally, and through Djinn over loopback TCP, as medians in milliseconds."""
    results: Found = {}
    with serving(device=device):
        for name, make in TIMED.items():
            results[name] = {
                "local ms": round(median(make(device), device), 3),
                "remote ms": round(median(make(REMOTE), REMOTE), 3),
            }
    return results


def median(run: Callable[[], object], device: str, times: int = 30) -> float:
    """Return the median time of calls that end when the device is done, in milliseconds."""
    for _ in range(10):
        run()
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        run()
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds) * 1e3


def timed_round_trip(device: str) -> Callable[[], object]:
    x = torch.ones(1, device=device)
    return lambda: x.add(1).item()


def timed_matmul(device: str) -> Callable[[], object]:
    size = 4096 if torch.cuda.is_available() else 512
    x = torch.randn(size, size).to(device)
    return lambda: x.mm(x).sum().item()


def timed_decode(device: str) -> Callable[[], object]:
    model = gpt2(device) if torch.cuda.is_available() else gpt2(device, n_layer=2, n_embd=64, n_head=2, vocab_size=500)
    inputs = torch.arange(16)[None].to(device)

    def tokens() -> Iterator[int]:
        with torch.no_grad():
            out = model(inputs, use_cache=True)
            while True:
                token = out.logits[:, -1:].argmax(-1)
                yield token.item()
                out = model(token, past_key_values=out.past_key_values, use_cache=True)

    stream = tokens()
    return lambda: next(stream)


def timed_training_step(device: str) -> Callable[[], object]:
    model = gpt2(device) if torch.cuda.is_available() else gpt2(device, n_layer=2, n_embd=64, n_head=2, vocab_size=500)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    inputs = torch.arange(4 * 128).remainder(400).reshape(4, 128).to(device)

    def step() -> float:
        optimizer.zero_grad()
        loss = model(inputs, labels=inputs).loss
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


TIMED = {
    "round trip": timed_round_trip,
    "matrix product": timed_matmul,
    "GPT-2, one token": timed_decode,
    "GPT-2, training step of 4 x 128": timed_training_step,
}

PARTS: dict[str, Callable[[str], Found]] = {
    part.__name__: part
    for part in (
        devices, training, generation, randomness, autocast, numeric_settings, streams, copies, memory_figures, out_of_memory,
        filling, asserts, spill, idle, weights, cuda_names, two_clients, crash, inductor, graphs, tensorrt, calibration, demo,
        databases, ray, two_gpus, times,
    )
}  # fmt: skip


if __name__ == "__main__":
    try:
        sys.exit(run_part(PARTS, __doc__))
    finally:
        with contextlib.suppress(Exception):
            djinn.shut_down()
