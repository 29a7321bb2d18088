"""Parts of the GPU report that need an executor process and no client: they run without a compiler, in seconds.

An executor is compared with plain PyTorch on the same device. `run_gpu.py` starts each part in a separate process:

    python -m evaluation.gpu.executor_parts PART --device cuda:0 --to FILE
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import attrs
import torch
from torch import Tensor
from torch.nn import functional

from djinn_core.errors import StartupError
from djinn_core.system.role import become_server
from evaluation import ROOT
from evaluation.gpu.frames import (
    Client,
    RecordedProgram,
    Step,
    executor,
    hidden_synchronizations,
    memory_of,
    record,
    session,
)
from evaluation.gpu.part_process import Found, NotRun, run_part

MIB: Final = 1 << 20
PINNED_BYTES: Final = 64 * MIB  # two halves of the ring of 32 MiB each
SLOW: Final = 1.5  # maximum time relative to plain PyTorch


def on_gpu(device: str) -> bool:
    """Return True for a GPU, on which sizes are realistic and times meaningful."""
    return device.startswith("cuda")


def needs_accelerator(device: str) -> None:
    """Raise `NotRun` on the CPU."""
    if device == "cpu":
        raise NotRun("it needs an accelerator")


# --- programs -----------------------------------------------------------------------------------------------------------


@attrs.frozen
class Model:
    """A transformer with one head and no norms. Its methods change the tensors of a state in place.

    Attributes:
        layers, width, vocabulary: sizes of the model. length: number of positions.
    """

    layers: int
    width: int
    length: int
    vocabulary: int = 1000

    @classmethod
    def sized_for(cls, device: str) -> Model:
        """Return a model whose decoding is launch-bound on a GPU, and a tiny one otherwise."""
        return cls(12, 768, 512) if on_gpu(device) else cls(2, 32, 64)

    def weights(self) -> list[Tensor]:
        """Return the embedding and six matrices per layer."""
        torch.manual_seed(0)
        shapes = [(self.width, self.width)] * 4 + [(self.width, 4 * self.width), (4 * self.width, self.width)]
        return [
            torch.randn(*shape) / shape[0] ** 0.5 for shape in [(self.vocabulary, self.width), *shapes * self.layers]
        ]

    def decode_state(self) -> list[Tensor]:
        """Return a token, its position, keys and values of each layer, and the weights."""
        caches = [torch.zeros(self.length, self.width) for _ in range(2 * self.layers)]
        return [torch.tensor([7]), torch.tensor([0]), *caches, *self.weights()]

    def decode(self, state: Sequence[Tensor]) -> None:
        """Replace the token in `state` by the next token."""
        token, position, *rest = state
        caches, (table, *matrices) = rest[: 2 * self.layers], rest[2 * self.layers :]
        x = functional.embedding(token, table)
        features = torch.arange(self.length, device=x.device) <= position
        for layer in range(self.layers):
            query, key, value, out, up, down = matrices[6 * layer : 6 * layer + 6]
            keys, values = caches[2 * layer], caches[2 * layer + 1]
            keys.index_copy_(0, position, x @ key)
            values.index_copy_(0, position, x @ value)
            scores = (x @ query) @ keys.t() * self.width**-0.5
            x = x + torch.softmax(scores.masked_fill(~features, float("-inf")), -1) @ values @ out
            x = x + functional.gelu(x @ up) @ down
            x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
        token.copy_((x @ table.t()).argmax(-1))
        position.add_(1)

    def train_state(self) -> list[Tensor]:
        """Return tokens, labels (some ignored), the last loss, the weights and their momenta."""
        tokens = torch.arange(self.length) * 7 % self.vocabulary
        labels = torch.where(tokens % 5 == 0, -100, (tokens + 1) % self.vocabulary)
        weights = self.weights()
        return [tokens, labels, torch.zeros(()), *weights, *map(torch.zeros_like, weights)]

    def train(self, state: Sequence[Tensor]) -> None:
        """Run a step of SGD with momentum: update weights, momenta and loss. The matrices are layers of a perceptron."""
        tokens, labels, last_loss, *rest = state
        weights, momenta = rest[: len(rest) // 2], rest[len(rest) // 2 :]
        table, *matrices = leaves = [weight.detach().requires_grad_() for weight in weights]
        x = functional.embedding(tokens, table)
        for at in range(0, len(matrices), 6):
            for matrix in matrices[at : at + 4]:
                x = functional.layer_norm(x + functional.gelu(x @ matrix), (self.width,))
            x = x + functional.gelu(x @ matrices[at + 4]) @ matrices[at + 5]
        loss = functional.cross_entropy(x @ table.t(), labels)
        torch._foreach_mul_(momenta, 0.9)
        torch._foreach_add_(momenta, torch.autograd.grad(loss, leaves))
        torch._foreach_add_(weights, momenta, alpha=-0.01)
        last_loss.copy_(loss.detach())


def many_ops(count: int, state: Sequence[Tensor]) -> None:
    """Run `count` ops on one element, to measure issue cost."""
    for _ in range(count):
        state[0].add_(1)


def products(count: int, device: str) -> Step:
    """Return a program of `count` dependent matrix products that writes one number. On an H200, a product takes about 0.2 s."""
    size = 16384 if on_gpu(device) else 512

    def step(state: Sequence[Tensor]) -> None:
        factor = torch.zeros(size, size, device=state[0].device)
        product = torch.empty_like(factor)
        for _ in range(count):
            torch.mm(factor, factor, out=product)
        state[0].copy_(product[0, 0])

    return step


def blocks(nbytes: int) -> RecordedProgram:
    """Return a program that allocates `nbytes` bytes of value 1. Its input can be any tensor."""
    return record(lambda state: [torch.ones(nbytes, dtype=torch.uint8, device=state[0].device)], [torch.zeros(1)])


# --- execution --------------------------------------------------------------------------------------------------------


def prepare(client: Client, step: Step, state: Sequence[Tensor]) -> tuple[RecordedProgram, list[int]]:
    """Upload the tensors in `state`. Return the recorded program, and the handles of its inputs."""
    return record(step, state), [client.upload(tensor) for tensor in state]


def plain_device(device: str) -> torch.device:
    """Return the device for plain PyTorch in this process."""
    if device.startswith("fakegpu"):
        from djinn_fakegpu.library import load

        load()
    return torch.device(device)


def synchronize(device: torch.device) -> None:
    """Wait for a device."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def seconds_each(run: Callable[[], object], times: int) -> float:
    """Return the seconds of a call that waits for the device: the minimum of three rounds of `times` calls."""
    run()
    results = []
    for _ in range(3):
        start = time.perf_counter()
        for _ in range(times):
            run()
        results.append((time.perf_counter() - start) / times)
    return min(results)


def beside_plain(device: str, plain: Callable[[], object], remote: Callable[[], object], times: int, ops: int) -> Found:
    """Return the times of plain PyTorch and of an executor. On a GPU, `SLOW` times as long is marked as slow."""
    here, there = seconds_each(plain, times), seconds_each(remote, times)
    results: Found = {
        "plain ms": round(here * 1e3, 3),
        "executor ms": round(there * 1e3, 3),
        "ratio": round(there / here, 3),
    }
    results |= {
        "ops": ops,
        "plain us an op": round(here / ops * 1e6, 2),
        "executor us an op": round(there / ops * 1e6, 2),
    }
    return results | (
        {"slow": f"{there / here:.2f} times plain PyTorch"} if on_gpu(device) and there > SLOW * here else {}
    )


# --- parts ----------------------------------------------------------------------------------------------------------------


def issuing(device: str) -> Found:
    """Measure the issue time per op, against plain PyTorch."""
    place, ops = plain_device(device), 1000
    here = [torch.zeros(1, device=place)]

    def plain() -> None:
        many_ops(ops, here)
        synchronize(place)

    with session(device) as client:
        program, inputs = prepare(client, partial(many_ops, ops), [torch.zeros(1)])
        result = beside_plain(device, plain, lambda: client.run(program, inputs), 5, ops)
        assert client.run(fetch=inputs)[0].item() == here[0].item(), "ops had no effect"
        return result


def decode_steps(device: str) -> Found:
    """Measure tokens that are fetched one by one."""
    model = Model.sized_for(device)
    return compared(device, model.decode, model.decode_state(), fetched=1)


def train_steps(device: str) -> Found:
    """Measure training steps without fetches."""
    model = Model.sized_for(device)
    return compared(device, model.train, model.train_state(), fetched=0)


def compared(device: str, step: Step, state: Sequence[Tensor], fetched: int) -> Found:
    """Compare values after two steps, count hidden synchronisations in ten, and time steps.

    `fetched`: number of tensors of the state that a step returns.

    Raises:
        AssertionError: values differ, or the executor waited for the device other than for an event.
    """
    place = plain_device(device)
    here = [tensor.to(place) for tensor in state]

    def plain() -> None:
        step(here)
        synchronize(place)

    with session(device) as client:
        program, inputs = prepare(client, step, state)

        def remote() -> None:
            client.submit(program, inputs, inputs[:fetched], synchronize=not fetched)
            client.answer()

        for run in (plain, remote) * 2:
            run()
        there = [client.run(fetch=[handle])[0] for handle in inputs]
        for one, other in zip(here, there, strict=True):
            torch.testing.assert_close(other, one.cpu())
        equal = all(torch.equal(one.cpu(), other) for one, other in zip(here, there, strict=True))
        before = client.figures()
        for _ in range(10):
            client.submit(program, inputs, inputs[:fetched])
        for _ in range(10):
            client.answer()
        hidden = hidden_synchronizations(before, client.figures())
        assert not hidden, f"hidden synchronisations in 10 steps: {hidden}"
        times = 20 if on_gpu(device) else 2
        return {"bitwise equal": equal} | beside_plain(device, plain, remote, times, len(program.template.code))


def transfers(device: str) -> Found:
    """Measure bandwidth against pinned copies of plain PyTorch, page-locked memory, and an upload beside compute."""
    place = plain_device(device)
    data = torch.randint(0, 255, ((512 if on_gpu(device) else 32) * MIB,), dtype=torch.uint8)
    source = data if place.type == "cpu" else data.pin_memory()
    times = {"plain": seconds_each(lambda: (source.to(place, non_blocking=True), synchronize(place)), 1)}

    def timed(name: str, run: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        result = run()
        times[name] = time.perf_counter() - start
        return result

    with session(device) as client:
        program, inputs = prepare(client, products(4, device), [torch.zeros(())])
        client.run(program, inputs)
        client.run(fetch=[client.upload(data[:MIB])])  # allocates the ring

        def upload(*before: Any) -> int:
            client.submit(*before)
            handle = client.upload(data)
            client.answer()
            client.run()
            return handle

        handle = timed("up", upload)
        (back,) = timed("down", lambda: client.run(fetch=[handle]))
        assert torch.equal(back, data), "other bytes came back"
        timed("compute", lambda: client.run(program, inputs))
        timed("compute and up", lambda: upload(program, inputs))
        pinned_bytes = client.figures().get("device_pinned_bytes_peak", 0)
    assert pinned_bytes <= PINNED_BYTES, f"{pinned_bytes >> 20} MiB of page-locked memory"
    figures: Found = {f"{name} s": round(seconds, 4) for name, seconds in times.items()}
    figures |= {f"{name} GB/s": round(data.numel() / times[name] / 1e9, 2) for name in ("plain", "up", "down")}
    ratio = times["compute and up"] / max(times["compute"], times["up"])
    slow = f"an upload beside compute takes {ratio:.2f} times the longer of both" if ratio > 1.25 else ""
    slow = slow or (
        "less than 1 GB/s over a local socket" if data.numel() / max(times["up"], times["down"]) < 1e9 else ""
    )
    return figures | {"pinned MiB": pinned_bytes >> 20, "slow": slow if on_gpu(device) else ""}


def device_time(device: str) -> Found:
    """Compare the op times that the executor reports from device events with those of plain PyTorch."""
    needs_accelerator(device)
    place, step = plain_device(device), products(10, device)
    here = [torch.zeros((), device=place)]
    for _ in range(2):
        began, end = (torch.Event(place, enable_timing=True) for _ in range(2))
        began.record()
        step(here)
        end.record()
        end.synchronize()
    plain = began.elapsed_time(end) / 1e3
    torch.accelerator.empty_cache()
    with session(device) as client:
        program, inputs = prepare(client, step, [torch.zeros(())])
        client.time_ops()
        for _ in range(2):
            client.submit(program, inputs)
            reply, _ = client.answer()
        assert reply.times is not None
        report = sum(memoryview(reply.times.ops).cast("f")[1::2])
    agrees = (
        0.5 * plain < report < 2 * plain if on_gpu(device) else report > 0
    )  # on other devices, kernels take no longer than their issue
    assert agrees, f"the executor's events tell {report:.6f} s, and plain PyTorch's {plain:.6f} s"
    return {
        "plain s": round(plain, 4),
        "told s": round(report, 4),
        "counted for fairness s": round(reply.timing.execute, 4),
    }


def slow_fetch(device: str) -> Found:
    """Measure a session that waits for its result, and a second session on the GPU that issues a small op meanwhile."""
    needs_accelerator(device)
    with executor(device) as process, closing(Client(process)) as long, closing(Client(process)) as short:
        program, inputs = prepare(long, products(10, device), [torch.zeros(())])
        small, input_tensor = prepare(short, partial(many_ops, 1), [torch.zeros(1)])
        long.run(program, inputs)
        short.run(small, input_tensor)
        start = time.perf_counter()
        long.submit(program, inputs, fetch=inputs)
        time.sleep(0.02)  # so that the other session gets its turn
        short.submit(small, input_tensor)
        short.answer()
        other = time.perf_counter() - start
        long.answer()
        whole = time.perf_counter() - start
    results: Found = {"small op s": round(other, 4), "slow fetch s": round(whole, 4)}
    return results | (
        {"slow": "a small op waited for another session's result"} if on_gpu(device) and other > whole / 2 else {}
    )


def exhausted(device: str) -> Found:
    """Exhaust memory: values are evicted and restored, and an impossible allocation fails only its op."""
    needs_accelerator(device)
    unit = memory_of(device) // 64
    with session(device) as client:
        start, witness = [client.upload(torch.zeros(1))], client.upload(torch.arange(1000.0))
        before = client.figures()["device_allocated"]

        def run(program: RecordedProgram | None, inputs: Sequence[int] = (), free: Sequence[int] = ()) -> list[int]:
            handles = client.submit(program, inputs, free=free)
            client.answer()
            return handles

        for number in range(20, 26):  # sizes that cached blocks do not fit later
            run(None, free=run(blocks(number * unit), start))
        large = run(blocks(40 * unit), start)
        other = run(blocks(40 * unit), start)
        client.submit(blocks(70 * unit), start)
        text = client.failure()
        total = run(record(lambda state: [state[0].sum()], [torch.ones(1, dtype=torch.uint8)]), large)
        assert client.run(fetch=total)[0].item() == 40 * unit, "an evicted value has changed"
        assert client.run(fetch=[witness])[0].sum().item() == 499_500, "a value from before the allocation has changed"
        run(None, free=[*large, *other, *total])
        after = client.figures()
    assert "memory" in text.lower(), f"an allocation beyond the memory did not fail: {text}"
    leaked_bytes = after["device_allocated"] - before
    assert leaked_bytes <= MIB, f"{leaked_bytes:,} bytes are lost"
    return {"evictions": after.get("evictions", 0), "said": text[:300]}


def device_assert(device: str) -> Found:
    """Trigger a device-side assert: the executor names the op and ends at once, and its replacement works."""
    state = [torch.tensor([3, 99]), torch.ones(10, 4)]
    return lost(device, lambda state: [functional.embedding(*state)], state, "embedding")


def hung_kernel(device: str) -> Found:
    """Run a kernel longer than `hang_seconds`: the executor ends, and its replacement works."""
    return lost(device, products(60, device), [torch.zeros(())], "hang", hanging="aten::mm")


def lost(device: str, step: Step, state: Sequence[Tensor], expected: str, hanging: str = "") -> Found:
    """Run a program that kills the executor, then a program on its replacement.

    `expected`: pattern of the error. `hanging`: op that hangs on `fakegpu`.

    Raises:
        AssertionError: the executor survives, the error does not match, or the replacement fails.
    """
    needs_accelerator(device)
    with TemporaryDirectory() as folder, executor(device, folder, hang_seconds=1.0) as process:
        with closing(Client(process)) as client:
            program, inputs = prepare(client, step, state)
            if hanging and not on_gpu(device):
                from djinn_fakegpu.remote_control import RemoteControl

                RemoteControl(Path(folder)).inject("hang", hanging)
            client.submit(program, inputs, synchronize=True)
            start = time.perf_counter()
            with suppress(Exception):  # errors of a broken connection
                client.failure()
        while process.alive and time.perf_counter() - start < 20:
            time.sleep(0.02)
        seconds, alive = time.perf_counter() - start, process.alive
        assert not alive, "the executor did not end, although its device is lost"
        text = process.ending()
        with process.restart() as again:
            again.wait_ready(60)
            with closing(Client(again)) as client:
                program, inputs = prepare(client, partial(many_ops, 3), [torch.zeros(1)])
                assert client.run(program, inputs, inputs)[0].item() == 3
    assert expected in text, text
    return {"seconds": round(seconds, 2), "said": text[:400]}


def graph_capture(device: str) -> Found:
    """Capture a decode step as a graph in the executor: replays give the tokens of plain PyTorch."""
    needs_accelerator(device)
    place, model = plain_device(device), Model.sized_for(device)
    from djinn_server.hookspecs.devices import DeviceRuntime
    from djinn_server.hookspecs.run_strategies import StrategyContext
    from djinn_server.running.template_compiler import compile_template
    from djinn_server.shared_device import SharedDevice
    from djinn_strategies.graphs import GraphRecorder

    expected, state = ([tensor.to(place) for tensor in model.decode_state()] for _ in range(2))
    program = record(model.decode, state)
    shared_device = SharedDevice(DeviceRuntime(place))
    steps = compile_template(program.template, place, shared_device.own)

    def run() -> tuple[torch.Tensor, ...]:
        env = [*steps.constants, *program.slots, *state, *[None] * steps.computed]
        for step in steps.steps:
            step.run(env)
        return ()

    with torch.inference_mode():
        run()
        recorder = GraphRecorder()
        recorder.begin(StrategyContext(shared_device))
        launch, _, nbytes = recorder.record(run)
        for _ in range(8):
            launch()
        synchronize(place)
        for _ in range(9):
            model.decode(expected)
        for one, other in zip(state, expected, strict=True):
            torch.testing.assert_close(one.cpu(), other.cpu())
    return {"ops": len(steps.steps), "bytes": nbytes}


def replay_library(device: str) -> Found:
    """Build the library with which executors issue ops. Without it, Python issues them."""
    from djinn_server.running.native_replay import LIBRARY

    try:
        return {"library": LIBRARY.build().name}
    except (StartupError, OSError) as error:
        raise NotRun(f"Python issues ops: {error}"[:300]) from None


def native_library(device: str) -> Found:
    """Build the client's device for the installed PyTorch."""
    options: dict[str, Any] = {"capture_output": True, "text": True}
    load = [sys.executable, "-c", "import djinn_native; djinn_native.load()"]
    if subprocess.run(load, check=False, **options).returncode == 0:
        return {"library": "was there"}
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    environment = os.environ | {"MAX_JOBS": str(os.cpu_count())}
    process = subprocess.run(command, check=False, cwd=ROOT / "djinn_native", env=environment, **options)
    if process.returncode:
        raise NotRun(f"the library cannot be built: {(process.stderr.strip() or 'no message').splitlines()[-1]}")
    return {"library": "built"}


PARTS: dict[str, Callable[[str], Found]] = {
    part.__name__: part
    for part in (
        issuing, decode_steps, train_steps, transfers, device_time, slow_fetch, exhausted, device_assert, hung_kernel, graph_capture, replay_library, native_library,
    )
}  # fmt: skip

if __name__ == "__main__":
    become_server("executor")  # so that importing `djinn` does not register its device here
    sys.exit(run_part(PARTS, __doc__))
