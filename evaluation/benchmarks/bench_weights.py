"""Weights that the server reads, against a locally read model and against sessions without sharing.

    python -m evaluation.benchmarks.bench_weights [--json] [--quick] [--case first_token]

A Llama with random weights is in a hub cache in several files. The configuration is in another cache, as on a client
without weights. All files are in the system's page cache.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import djinn
from djinn.testing import executor_processes
from evaluation.benchmarks import serving
from evaluation.benchmarks.links import Conditions, connected_over
from evaluation.benchmarks.measuring import Case, Effort, Outcome, compare, main, median_of

REMOTE = "remote_accelerator:0"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
PROMPT = torch.arange(1, 9)[None]
START_SECONDS = 300.0
SESSIONS = 8


@contextmanager
def caches(effort: Effort, share: int = 1) -> Iterator[tuple[Path, Path, int]]:
    """Yield the server's and the client's hub cache (the latter without weights), and the bytes of the model.

    `share`: divides the model's width, for a smaller model with as many tensors.
    """
    width, layers = (64, 2) if effort.small else (1024, 8) if effort.quick else (2048, 8)
    width //= share
    config = LlamaConfig(
        vocab_size=512 if effort.small else 32_000,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        server_cache, client_cache = Path(folder) / "server", Path(folder) / "client"
        model = LlamaForCausalLM(config)
        for cache in (server_cache, client_cache):
            repository = cache / "models--org--model"
            snapshot = repository / "snapshots" / COMMIT
            snapshot.mkdir(parents=True)
            (repository / "refs").mkdir()
            (repository / "refs" / "main").write_text(COMMIT)
            if cache == server_cache:
                model.save_pretrained(snapshot, max_shard_size="400MB")
            else:
                config.save_pretrained(snapshot)
        size = sum(parameter.nbytes for parameter in model.parameters())
        del model
        yield server_cache, client_cache, size


def load(cache: Path, device: str) -> Any:
    """Return the model on a device."""
    options = {"cache_dir": cache, "local_files_only": True, "device_map": device, "dtype": torch.float32}
    return AutoModelForCausalLM.from_pretrained("org/model", **options).eval()


def first_token(cache: Path, device: str) -> Any:
    """Load the model and decode its first token. Return the model."""
    model = load(cache, device)
    next_token(model, device)
    return model


def next_token(model: Any, device: str) -> None:
    """Decode one token."""
    with torch.no_grad():
        model(PROMPT.to(device)).logits[:, -1].argmax(-1).item()


def of_first_token(effort: Effort) -> Outcome:
    """Return the time to the first token on a server without other clients, divided by the local time."""
    with caches(effort) as (theirs, ours, size), serving.connected("--models", str(theirs), threads=effort.threads):
        local, remote = lambda: first_token(theirs, "cpu") and None, lambda: first_token(ours, REMOTE) and None
        alone = median_of(local, 2)
        remote()
        return compare(local, remote, effort, 4, alone).outcome(**{"model MB": size / 1e6})


def of_second_session(effort: Effort) -> Outcome:
    """Return the seconds to load all weights while another session has the model, so that the server reads no file.

    The figures also cover a model of a quarter of the width, which should load as fast, and forward passes of both.
    """
    figures: dict[str, float] = {}
    ready = 0.0
    for share in (4, 1):
        with (
            caches(effort, share) as (theirs, ours, size),
            serving.connected("--models", str(theirs), threads=effort.threads),
        ):
            references = first_token(ours, REMOTE)
            ready = median_of(lambda cache=ours: load_fully(cache) and None, effort.times(8))
            forward = median_of(lambda model=references: next_token(model, REMOTE), effort.times(8))
            figures |= {f"ready s, {size / 1e6:.0f} MB": ready, f"forward pass s, {size / 1e6:.0f} MB": forward}
    return Outcome(ready, figures)


def load_fully(cache: Path) -> Any:
    """Load the model, and wait until its weights are on the device. Return it."""
    model = load(cache, REMOTE)
    djinn.synchronize()
    return model


def of_bytes(effort: Effort) -> Outcome:
    """Return the megabytes through the client, both ways, for a model and its first token."""
    with caches(effort) as (theirs, ours, size), serving.connected("--models", str(theirs), threads=effort.threads):
        djinn.init()
        djinn.reset_stats()
        first_token(ours, REMOTE)
        stats = djinn.stats()
        return Outcome((stats["bytes_sent"] + stats["bytes_received"]) / 1e6, {"model MB": size / 1e6})


def of_far_client(effort: Effort) -> Outcome:
    """Return the additional time of loading over 100 Mbit/s against loopback, in round trips of 30 ms."""
    with caches(effort) as (theirs, ours, _):
        conditions = Conditions(round_trip=0.03, bits_per_second=1e8)
        with serving.connected("--models", str(theirs), threads=effort.threads):
            first_token(ours, REMOTE)
            near = median_of(lambda: first_token(ours, REMOTE) and None, effort.times(8))
        with connected_over(conditions, "--models", str(theirs), threads=effort.threads) as link:
            first_token(ours, REMOTE)
            far = median_of(lambda: first_token(ours, REMOTE) and None, effort.times(8))
        return Outcome((far - near) / link.measured, {"near s": near, "far s": far, "link ms": link.measured * 1e3})


def holding(settings: dict[str, Any], cache: Path, loaded: Any, done: Any) -> None:
    """Run a client that loads the model, sends to `loaded`, and keeps the model until `done` is set."""
    torch.set_num_threads(1)
    djinn.shut_down()
    djinn.configure(**settings)
    model = first_token(cache, REMOTE)
    loaded.put(executor_processes()[0])
    done.wait(START_SECONDS)
    del model
    djinn.shut_down()


def of_eight_sessions(effort: Effort) -> Outcome:
    """Return the executor's memory with eight sessions of a model, divided by its memory with one session.

    Memory is the process's proportional set size (PSS): its own pages and the mapped model files.
    """
    spawning = multiprocessing.get_context("forkserver")  # so that the eight processes import everything once
    spawning.set_forkserver_preload(["transformers.models.llama", "djinn"])
    environment = {"DJINN_TOKEN": os.urandom(16).hex()}
    with (
        caches(effort) as (theirs, ours, size),
        serving.served("--store-gib", "0", "--models", str(theirs), environment=environment) as server,
    ):
        settings = {"servers": [server.tcp], "token": environment["DJINN_TOKEN"], "disable": ("local",)}
        djinn.shut_down()
        djinn.configure(**settings)
        djinn.init()
        process = psutil.Process(executor_processes()[0])
        before, sizes = process.memory_full_info().pss, []
        ready_queue, end_event = spawning.Queue(), spawning.Event()
        for _ in range(SESSIONS):
            spawning.Process(target=holding, args=(settings, ours, ready_queue, end_event), daemon=True).start()
            ready_queue.get(timeout=START_SECONDS)
            time.sleep(0.5)
            sizes.append(process.memory_full_info().pss - before)
        end_event.set()
        djinn.shut_down()
        djinn.configure()
    figures = {"one MB": sizes[0] / 1e6, "eight MB": sizes[-1] / 1e6, "model MB": size / 1e6}
    return Outcome(sizes[-1] / sizes[0], figures)


CASES = (
    Case("first_token", 1.15, of_first_token),
    Case("second_session", 0.5, of_second_session, unit="s"),
    Case("bytes", 2.0, of_bytes, unit="MB"),
    Case("far_client", 8.0, of_far_client, unit="round trips"),
    Case("eight_sessions", 1.1, of_eight_sessions),
)

if __name__ == "__main__":
    main("Weights that the server reads", CASES)
