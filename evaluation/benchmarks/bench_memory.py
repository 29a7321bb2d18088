"""Cost of a memory limit: bytes spilled and restored by models with 0.5 and 0.8 of the memory that they need.

    python -m evaluation.benchmarks.bench_memory [--only llama] [--needs FILE] [--json]

The need of a model is the peak of its tensors under a limit that does not bind. `--needs` reads the needs from a file,
or writes a missing file, so that two versions run with equal limits. Results must be bitwise equal to those without a
limit.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import djinn
from djinn.testing import executor_figures

REMOTE: Final = "remote_accelerator:0"
SHARES: Final = (0.5, 0.8)
AMPLE: Final = 8.0  # in GiB
FIGURES: Final = ("evictions", "spilled_bytes", "restored_bytes", "process_peak")
Results = Iterator[torch.Tensor]


def mlp(device: str) -> Results:
    """Train six layers of 768 with Adam."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(768, 768), nn.GELU()) for _ in range(6))).to(device)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3, foreach=False)
    data = torch.randn(256, 768).to(device)
    yield from trained(lambda: model(data).square().mean(), optimizer, 5)


def encoder_training(device: str) -> Results:
    """Train an encoder with SGD. Activations take most of the memory."""
    layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False).to(device)
    data = torch.randn(8, 128, 256).to(device)
    yield from trained(lambda: model(data).square().mean(), torch.optim.SGD(model.parameters(), 1e-3, foreach=False), 4)


def gpt2(device: str) -> Results:
    """Train a small GPT-2 with AdamW."""
    config = GPT2Config(n_layer=4, n_embd=256, n_head=4, vocab_size=2048, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    model = GPT2LMHeadModel(config).to(device)
    ids = torch.randint(0, 2048, (4, 128)).to(device)
    yield from trained(
        lambda: model(ids, labels=ids).loss, torch.optim.AdamW(model.parameters(), 1e-4, foreach=False), 4
    )


def convolutions(device: str) -> Results:
    """Train convolutions with SGD."""
    layers: list[nn.Module] = []
    for in_channels, output in ((3, 32), (32, 64), (64, 64), (64, 128), (128, 128)):
        layers += [nn.Conv2d(in_channels, output, 3, padding=1), nn.BatchNorm2d(output), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10)).to(device)
    data = torch.randn(4, 3, 32, 32).to(device)
    yield from trained(lambda: model(data).square().mean(), torch.optim.SGD(model.parameters(), 1e-3, foreach=False), 4)


def trained(loss_of: Callable[[], torch.Tensor], optimizer: torch.optim.Optimizer, steps: int) -> Results:
    """Return the losses of `steps` training steps."""
    for _ in range(steps):
        loss = loss_of()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.detach().cpu()


def llama(device: str) -> Results:
    """Decode sixteen tokens with a Llama of 55 MiB."""
    config = LlamaConfig(
        vocab_size=2048, hidden_size=512, intermediate_size=1024, num_hidden_layers=6, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=512, pad_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval().to(device)
    ids = torch.randint(1, 2048, (4, 64)).to(device)
    cache = None
    with torch.no_grad():
        for _ in range(16):
            out = model(ids, past_key_values=cache, use_cache=True)
            ids, cache = out.logits[:, -1:].argmax(-1), out.past_key_values
            yield ids.cpu()


def encoder(device: str) -> Results:
    """Run batches through an encoder. Weights take most of the memory."""
    layer = nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False).eval().to(device)
    with torch.no_grad():
        for _ in range(6):
            yield model(torch.randn(4, 64, 512).to(device))[:, 0].cpu()


def two_models(device: str) -> Results:
    """Alternate between two models, one used three times as often."""
    models = [nn.Sequential(*(nn.Linear(768, 768) for _ in range(8))).to(device) for _ in range(2)]
    with torch.no_grad():
        for turn in range(12):
            data = torch.randn(16, 768).to(device)
            yield models[turn % 4 == 3](data).cpu()


MODELS: Final = {one.__name__: one for one in (mlp, encoder_training, gpt2, convolutions, llama, encoder, two_models)}


def run(make: Callable[[str], Results], gib: float) -> tuple[list[torch.Tensor], dict[str, int]]:
    """Return the results of a model under a memory limit of `gib` GiB, and the figures of its executor."""
    djinn.shut_down()
    djinn.configure(servers=[], threads=1, memory_gib=gib)
    djinn.init()
    try:
        torch.manual_seed(0)
        results = list(make(REMOTE))
        djinn.synchronize()
        return results, executor_figures()
    finally:
        djinn.shut_down()
        djinn.configure()


def main() -> None:
    """Parse the command line, run, and print one row per model and limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append")
    parser.add_argument("--needs", type=Path)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    needs = json.loads(options.needs.read_text()) if options.needs is not None and options.needs.exists() else {}
    rows = []
    for name in options.only or MODELS:
        expected, figures = run(MODELS[name], AMPLE)
        need = needs.setdefault(name, figures["memory_run_peak"])
        for share in SHARES:
            result, figures = run(MODELS[name], share * need / 2**30)
            equal = all(torch.equal(a, b) for a, b in zip(expected, result, strict=True))
            row = {"model": name, "share": share, "need": need, "equal": equal, **{f: figures[f] for f in FIGURES}}
            print(json.dumps(row) if options.json else row, flush=True)
            rows.append(row)
    if options.needs is not None:
        options.needs.write_text(json.dumps(needs))
    assert all(row["equal"] for row in rows), "a result differs from the result without a limit"


if __name__ == "__main__":
    main()
