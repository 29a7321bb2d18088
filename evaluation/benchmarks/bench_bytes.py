"""Bytes on the connection. They are counted, so one run is enough, and other load does not matter.

    python -m evaluation.benchmarks.bench_bytes [--json] [--small] [--case decode_bytes_sent]

Bytes are those at the client's socket over loopback TCP, framing included.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping

import torch

import djinn
from evaluation.benchmarks.measuring import Case, Effort, Outcome, main
from evaluation.benchmarks.serving import connected
from evaluation.served import served

REMOTE = "remote_accelerator:0"

# A process that uses a model once and prints the counters.
USER = """
import json, sys, torch, djinn
from transformers import GPT2Config, GPT2LMHeadModel
torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(**json.loads(sys.argv[1]))).eval().to("remote_accelerator:0")
with torch.no_grad():
    model(torch.arange(16)[None].to("remote_accelerator:0")).logits.sum().item()
print(json.dumps(djinn.stats()))
"""
SMALL = {"n_layer": 12, "n_embd": 48, "n_head": 12, "vocab_size": 1000}  # the ops of GPT-2-small on less data


def count(run: Callable[[], object]) -> Mapping[str, float]:
    """Return the increase of this process's counters during `run`."""
    djinn.synchronize()
    before = dict(djinn.stats())
    run()
    return {name: value - before[name] for name, value in djinn.stats().items()}


def a_token(name: str, effort: Effort) -> Outcome:
    """Return a counter's increase per token of greedy `generate` with a growing cache."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    with connected():
        model = GPT2LMHeadModel(GPT2Config(**SMALL if effort.small else {})).eval().to(REMOTE)
        prompt = torch.arange(1, 17)[None].to(REMOTE)  # without padding, which transformers would check at each step

        def generate(tokens: int) -> None:
            model.generate(prompt, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0).cpu()

        few, many = (4, 12) if effort.small else (16, 48)
        for tokens in (many, many, few):  # first runs make plans and templates
            generate(tokens)
        short, long = count(lambda: generate(few)), count(lambda: generate(many))
    results = {key: (long[key] - short[key]) / (many - few) for key in long}
    required = ("bytes_sent", "bytes_received", "round_trips", "submissions", "templates_sent")
    return Outcome(results[name], {key.replace("_", " "): results[key] for key in required if key != name})


def second_process(effort: Effort) -> Outcome:
    """Return the bytes sent by a second process with the same model, divided by those of the first."""
    with (
        tempfile.TemporaryDirectory() as folder,
        served("--store", folder, "--store-gib", "4", threads=effort.threads) as serving,
    ):
        access = {"DJINN_SERVERS": serving.tcp, "DJINN_TOKEN": serving.token, "DJINN_DISABLE": "local"}
        command = [sys.executable, "-W", "ignore", "-c", USER, json.dumps(SMALL if effort.small else {})]
        first, second = (
            json.loads(subprocess.run(command, env=os.environ | access, capture_output=True, check=True).stdout)
            for _ in range(2)
        )
    return Outcome(
        second["bytes_sent"] / first["bytes_sent"],
        {"first sent": first["bytes_sent"], "second sent": second["bytes_sent"]},
    )


def element(_: Effort) -> Outcome:
    """Return the bytes that `x[5].item()` receives for a tensor of 16 MB."""
    with connected():
        x = torch.arange(4 << 20, dtype=torch.float32).to(REMOTE)
        x[4].item()
        result = count(lambda: x[5].item())  # noqa: PLW0108 - indexing is part of it
    return Outcome(result["bytes_received"], {"bytes sent": result["bytes_sent"], "round trips": result["round_trips"]})


CASES = (
    Case("decode_bytes_sent", 1024, lambda effort: a_token("bytes_sent", effort), "B"),
    Case("decode_round_trips", 1, lambda effort: a_token("round_trips", effort), ""),
    Case("second_process", 0.01, second_process),
    Case("element_bytes_received", 1024, element, "B"),
)

if __name__ == "__main__":
    main("Bytes and round trips", CASES)
