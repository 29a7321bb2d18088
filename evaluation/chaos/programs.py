"""Programs for disturbances. Each returns its results and a hash of all state."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import itertools
import signal
import threading
from collections.abc import Callable, Iterator

import torch

import djinn

REMOTE = "remote_accelerator:0"
Program = Callable[[Callable[[int], object]], object]


def digest_of_state() -> str:
    """Return a hash of all reachable tensors on the device, and of the remote and local random state."""
    gc.collect()
    results = []
    for item in gc.get_objects():
        if issubclass(type(item), torch.Tensor) and item.device.type == "remote_accelerator":
            here = item.detach().cpu().contiguous()
            about = f"{tuple(item.shape)} {item.stride()} {item.dtype} {item.requires_grad}"
            results.append(about.encode() + here.view(-1).view(torch.uint8).numpy().tobytes())
    digests = sorted(hashlib.sha256(data).digest() for data in results)
    states = [torch.get_rng_state(), torch.remote_accelerator.get_rng_state(0)]
    digests += [state.cpu().numpy().tobytes() for state in states]
    return f"{len(results)} tensors {hashlib.sha256(b''.join(digests)).hexdigest()}"


def train(at: Callable[[int], object]) -> object:
    """Train with dropout, AdamW and in-place updates for 40 steps. `at` is called with the number of each step."""
    torch.manual_seed(5)
    layers = [torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(32, 4)]
    model = torch.nn.Sequential(*layers).to(REMOTE)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    inputs, required = torch.randn(32, 16).to(REMOTE), torch.randint(0, 4, (32,)).to(REMOTE)
    average, losses = torch.zeros(4, 32, device=REMOTE), []
    for step in range(40):
        at(step)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(inputs), required)
        loss.backward()
        optimizer.step()
        average.mul_(0.9).add_(model[3].weight.detach(), alpha=0.1)
        noise = torch.rand(8, device=REMOTE)
        average[0, :8] += noise
        if step % 3 == 0:
            losses.append(loss.item())
    return losses, digest_of_state()


def sample(at: Callable[[int], object]) -> object:
    """Sample tokens with a KV cache that grows by `cat`. `at` is called with the number of each token."""
    torch.manual_seed(6)
    embedding, out = (torch.randn(64, 32) * 0.5).to(REMOTE), torch.randn(32, 64).to(REMOTE)
    query, key, value = ((torch.randn(32, 32) * 0.3).to(REMOTE) for _ in range(3))
    keys, values = torch.zeros(0, 32, device=REMOTE), torch.zeros(0, 32, device=REMOTE)
    token, tokens = 1, []
    for number in range(16):
        at(number)
        x = embedding[token : token + 1]
        keys, values = torch.cat((keys, x @ key)), torch.cat((values, x @ value))
        x = x + torch.softmax(x @ query @ keys.T / 32**0.5, -1) @ values
        token = int(torch.multinomial(torch.softmax(x @ out, -1), 1).item())
        tokens.append(token)
    return tokens, digest_of_state()


def generate(_: Callable[[int], object]) -> object:
    """Decode greedily with a small Llama of transformers. The cache is part of the state."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 500}
    model = LlamaForCausalLM(LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **sizes)).eval().to(REMOTE)
    prompt = torch.randint(0, 500, (1, 12)).to(REMOTE)
    result = model.generate(
        prompt, max_new_tokens=40, do_sample=False, pad_token_id=0, return_dict_in_generate=True, use_cache=True
    )
    return result.sequences.tolist(), digest_of_state()


def upload(at: Callable[[int], object]) -> object:
    """Upload tensors of 2 to 8 MiB, in frames of 4 MiB, and write to them. `at` is called with the number of each."""
    torch.manual_seed(7)
    references = []
    for number in range(4):
        source = torch.randint(0, 256, (2 << 20, 1 + number), dtype=torch.uint8)
        at(number)
        references.append(source.to(REMOTE))
        references[-1][number] += 1
        view = references[-1].view(-1)[:1000]
        view.mul_(3)
    return digest_of_state()


def interrupted(at: Callable[[int], object]) -> object:
    """Train. After each step, start long work that changes no state, and interrupt it with Ctrl-C.

    `at` is called with the number of each step.
    """
    torch.manual_seed(8)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 8)).to(REMOTE)
    optimizer, inputs = torch.optim.AdamW(model.parameters(), 1e-2), torch.randn(16, 64).to(REMOTE)
    for step in range(8):
        at(step)
        optimizer.zero_grad()
        loss = torch.nn.functional.dropout(model(inputs), 0.1).square().mean()
        loss.backward()
        optimizer.step()
        djinn.synchronize()  # Ctrl-C stops work that has not run, this step included
        press = threading.Timer(0.2, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
        press.start()
        with contextlib.suppress(KeyboardInterrupt):
            _work_for_ever(model[0].weight.detach())
    return loss.item(), digest_of_state()


def _work_for_ever(square: torch.Tensor) -> None:
    while True:
        product = square
        for _ in range(300):
            product = product @ square
        product.sum().item()


def switch(at: Callable[[int], object], number: Iterator[int] = itertools.count()) -> object:  # noqa: B008 - of all calls
    """Run a new program 48 times, so that its run strategy changes meanwhile. `at` is called with the number of each run.

    Calls of this function run different ops with equal results.
    """
    torch.manual_seed(9)
    weight, state, bits = torch.randn(32, 32).to(REMOTE), torch.randn(4, 32).to(REMOTE), f"{next(number):010b}"
    sums = []
    for run in range(48):
        at(run)
        for bit in bits:
            state = state.neg().neg() if bit == "1" else state.clone()
        state = torch.tanh(state @ weight)
        sums.append(state.sum().item())
    return sums, digest_of_state()


PROGRAMS: dict[str, Program] = {"generate": generate, "train": train, "sample": sample, "upload": upload}
