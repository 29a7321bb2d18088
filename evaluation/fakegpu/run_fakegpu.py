"""Cost of a client's programs on an accelerator, counted by the device `fakegpu` of an executor.

    python -m evaluation fakegpu [--tokens 64] [--steps 20] [--mib 1024] [--json]

A client of `djinn serve --device fakegpu` decodes with a toy GPT, trains it without reading a value, and moves `--mib` MiB each way.
With `--graphs`, the server records a training step and a decode step with a static cache, whose launches are counted.
The figures are growths of the device's own counters, and times of its simulated clock. The program ends with 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from servers import Server, fresh_python, started_server

import djinn
from djinn.testing import executor_figures
from djinn_fakegpu.remote_control import RemoteControl

if TYPE_CHECKING:
    from transformers import GPT2LMHeadModel

REMOTE: Final = "remote_accelerator:0"
MIB: Final = 1 << 20
PIECE_MIB: Final = 256  # MiB per transfer
LINK, FLOPS = 25e9, 1e12  # simulated rates per second: compute that overlaps an upload takes little real time
CAPTURE_RUNS: Final = 400  # most runs until a hot program is a graph
# maximum of each figure
BARS: Final = {
    "decode_syncs_per_token": 1.0,
    "decode_d2h_bytes_per_token": 64.0,
    "train_syncs_per_step": 0.0,
    "train_d2h_bytes_per_step": 0.0,
    "pinned_bytes_peak": 64.0 * MIB - 1,
    "pageable_copies": 0.0,
    "upload_overlap": 1.1,
    "launches_per_captured_step": 1.0,
    "ops_outside_graphs": 0.0,
    "launches_per_captured_token": 3.0,  # the token of a step is copied from the graph, and to it in the next step
}
Figures = dict[str, float]


@contextmanager
def serving(
    folder: Path, environment: Mapping[str, str], *options: object, start: Callable[..., Any] = fresh_python
) -> Iterator[Server]:
    """Run a server on `fakegpu` with defaults except snapshots. `RemoteControl(folder)` reaches its device."""
    command: list[object] = ["-m", "djinn_core.cli", "serve", "--connection-file", folder / "connection.json"]
    # Snapshots would read values at unpredictable times.
    command += ["--device", "fakegpu", "--threads", "1", "--snapshot-seconds", "3600", *options]
    server = started_server(start, command, folder, {**environment, "DJINN_PLUGIN_FAKEGPU_CONTROL": str(folder)})
    try:
        yield server
    finally:
        status = server.stop()
    if status:
        raise RuntimeError(f"the server ended with {status}: {server.log.read_text()}")


@contextmanager
def session(folder: Path, environment: Mapping[str, str], *options: object) -> Iterator[None]:
    """Make `remote_accelerator` the device of a new server with these options."""
    with serving(folder, environment, *options) as server:
        settings: dict[str, Any] = {"servers": [server.url("tcp")], "token": server.token, "disable": ("local",)}
        djinn.configure(**settings)
        yield
        djinn.shut_down()


def counters() -> dict[str, int]:
    """Return the counters of the executor's device, and its memory figures, by name."""
    return {n.removeprefix("device_"): count for n, count in executor_figures().items() if n.startswith("device_")}


def count_increases(work: Callable[[], object]) -> Callable[[str], int]:
    """Run `work`, and return a function from a counter's name to its increase during `work`."""
    djinn.synchronize()
    before = counters()
    work()
    after = counters()
    return lambda name: after.get(name, 0) - before.get(name, 0)


def figures_each(work: Callable[[int], object], count: int, prefix: str, unit: str) -> Figures:
    """Run `work(count)`. Return the counters divided by `count`, under the names `{prefix}_{counter}_per_{unit}`."""
    grew = count_increases(lambda: work(count))
    results = {
        "syncs": grew("synchronizations"),
        "d2h_bytes": grew("bytes_device_to_host") + grew("bytes_device_to_pageable"),
        "launches": grew("launches"),
        "ops_outside_graphs": grew("ops_outside_graphs"),
    }
    return {f"{prefix}_{name}_per_{unit}": number / count for name, number in results.items()}


def send_recorded() -> None:
    """Have the executor issue all ops that were recorded. The executor does not wait for its device."""
    event = torch.Event(REMOTE)
    event.record()
    event.query()


def toy_gpt(**options: float) -> GPT2LMHeadModel:
    """Return a GPT of two layers on the device. `options`: of its configuration."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    tokens = {"bos_token_id": 0, "eos_token_id": 0, "loss_type": "ForCausalLM"}
    config = GPT2Config(vocab_size=384, n_positions=512, n_embd=64, n_layer=2, n_head=4, **tokens, **options)
    return GPT2LMHeadModel(config).to(REMOTE)


def decode_figures(tokens: int) -> Figures:
    """Decode with a KV cache. The client reads each token."""
    model = toy_gpt().eval()

    def decode(count: int) -> None:
        ids, cache = torch.arange(16)[None].to(REMOTE), None
        with torch.no_grad():
            for _ in range(count):
                out = model(ids, past_key_values=cache, use_cache=True)
                cache, ids = out.past_key_values, out.logits[:, -1].argmax(-1, keepdim=True)
                ids.item()

    decode(3)
    return figures_each(decode, tokens, "decode", "token")


def train_figures(steps: int) -> Figures:
    """Train with AdamW. The client uploads each batch and reads nothing."""
    model = toy_gpt().train()
    optimizer = torch.optim.AdamW(model.parameters())

    def train(count: int) -> None:
        for _ in range(count):
            batch = torch.randint(384, (4, 32)).to(REMOTE)
            optimizer.zero_grad()
            model(batch, labels=batch).loss.backward()
            optimizer.step()
        send_recorded()

    train(3)
    return figures_each(train, steps, "train", "step")


def captured_figures(steps: int) -> Figures:
    """Return the figures of training and decoding on a server that records graphs. All tensors are on the device."""
    train, decode = captured_training(), captured_decoding()
    train(3)
    before = counters()
    step, token = settled(train, steps), settled(decode, steps)
    return {
        "launches_per_captured_step": (step("graph_launches") + step("launches")) / steps,
        "ops_outside_graphs": step("ops_outside_graphs") / steps,
        "launches_per_captured_token": (token("graph_launches") + token("launches")) / steps,
        "memory_peak_without_graphs": before["peak"],
        "memory_peak_with_graphs": counters()["peak"],
        **{name: executor_figures()[name] for name in ("recorded_graphs", "recorded_graph_bytes")},
    }


def settled(work: Callable[[int], object], count: int) -> Callable[[str], int]:
    """Run `work` until all runs are graphs, at most `CAPTURE_RUNS` times, then `count` more times.

    Return a function from a counter's name to its increase during the last `count` runs.
    """
    for _ in range(CAPTURE_RUNS // 20):
        if count_increases(lambda: work(20))("graph_launches") >= 20:
            break
    return count_increases(lambda: work(count))


def captured_training() -> Callable[[int], None]:
    """Return a function that takes steps of AdamW with one batch."""
    model = toy_gpt(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0).train()
    optimizer, batch = torch.optim.AdamW(model.parameters()), torch.randint(384, (4, 32)).to(REMOTE)

    def train(count: int) -> None:
        for _ in range(count):
            optimizer.zero_grad()
            model(batch, labels=batch).loss.backward()
            optimizer.step()
            send_recorded()

    return train


def captured_decoding() -> Callable[[int], None]:
    """Return a function that decodes tokens with a static cache. The client reads each token."""
    from transformers import StaticCache

    model = toy_gpt().eval()
    cache = StaticCache(model.config, max_cache_len=512)
    ids, position = torch.zeros(1, 1, dtype=torch.long).to(REMOTE), torch.zeros(1, dtype=torch.long).to(REMOTE)

    @torch.no_grad()
    def decode(count: int) -> None:
        nonlocal ids
        for _ in range(count):
            logits = model(ids, past_key_values=cache, cache_position=position, position_ids=position[None]).logits
            ids = logits[:, -1].argmax(-1, keepdim=True)
            position.add_(1).remainder_(512)
            ids.item()

    return decode


def transfer_figures(mib: int) -> Figures:
    """Move `mib` MiB to the device and back."""

    def move() -> None:
        for number in range(0, mib, PIECE_MIB):
            here = torch.arange(min(PIECE_MIB, mib - number) << 17, dtype=torch.int64) + number
            assert torch.equal((here.to(REMOTE) + 1).cpu(), here + 1)

    grew = count_increases(move)
    directions = ("host_to_device", "device_to_host")
    return {
        "moved_bytes": sum(grew(f"bytes_{direction}") for direction in directions),
        "pageable_copies": grew("copies_pageable_to_device") + grew("copies_device_to_pageable"),
        "pinned_bytes_peak": counters()["pinned_bytes_peak"],
    }


def overlap_figures(mib: int, control: RemoteControl) -> Figures:
    """Return the simulated time of an upload of `mib` MiB during as much compute, divided by the longer of both."""
    control.configure(link=LINK, flops=FLOPS)
    square = torch.zeros(512, 512).to(REMOTE)
    products = round(mib * MIB / LINK / (2 * 512**3 / FLOPS))
    here = torch.arange(mib << 17, dtype=torch.int64)

    def seconds(*, upload: bool, compute: bool) -> float:
        def work() -> None:
            result = square
            for _ in range(products if compute else 0):
                result = result @ square
            send_recorded()
            there = here.add_(1).to(REMOTE) if upload else None
            djinn.synchronize()
            del there, result

        return count_increases(work)("clock_ns") * 1e-9

    alone = {"upload": seconds(upload=True, compute=False), "compute": seconds(upload=False, compute=True)}
    both = seconds(upload=True, compute=True)
    figures = {f"{name}_seconds": results for name, results in (*alone.items(), ("upload_and_compute", both))}
    return {**figures, "upload_overlap": both / max(alone.values())}


def missed(figures: Figures) -> dict[str, float]:
    """Return the figures above their bars."""
    return {name: value for name, value in figures.items() if name in BARS and value > BARS[name]}


def main() -> None:
    """Parse the command line, run, and end with 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("tokens", 64), ("steps", 20), ("mib", 1024)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="djinn-fakegpu-") as folder:
        environment = {**os.environ, "XDG_CACHE_HOME": folder}
        with session(Path(folder), environment):
            figures = decode_figures(options.tokens) | train_figures(options.steps)
            figures |= transfer_figures(options.mib) | overlap_figures(options.mib, RemoteControl(Path(folder)))
        with session(Path(folder), environment, "--graphs"):
            figures |= captured_figures(options.steps)
    above = missed(figures)
    for name, value in figures.items():
        print(f"{name:34} {value:20,.4f}{f'   missed: at most {BARS[name]:,.1f}' if name in above else ''}")
    if options.json:
        print(json.dumps(figures))
    sys.exit(bool(above))


if __name__ == "__main__":
    main()
