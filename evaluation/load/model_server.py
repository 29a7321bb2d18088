"""`examples/model_server.py` over a server and over the local CPU, under the same load, alternating.

    python -m evaluation model-server [--clients 8] [--rounds 6] [--seconds 10] [--hidden 512] [--layers 8] [--threads
        N]

Both model servers run all the time, and one of them is loaded at a time; a round has a turn of each. A client sends one
request after the other: 16 to 64 bytes of prompt and 32 tokens. The ratios are medians over rounds. `p99_ratio` and
`throughput_ratio` are remote divided by local. Needs an idle machine; `load_before` is the load average before.
`differing` counts prompts with more than one answer: greedy tokens of random weights can tie.

`--threads`: threads of the local model, by default all cores. The executor and the remote model server have one thread
each. 6 rounds of 10 s take about three minutes on an idle machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import aiohttp
import attrs

from djinn_commands.connect.tunnel import free_port
from evaluation import ROOT
from evaluation.served import plain_environment, served

EXAMPLE = ROOT / "examples" / "model_server.py"
TOKENS = 32
PROMPTS = tuple("".join(random.Random(n).choices("abcdefgh ", k=16 + 3 * n)) for n in range(17))
START_SECONDS = 240.0
MOST_P99, LEAST_THROUGHPUT = 1.1, 1.3


@attrs.frozen
class Turn:
    """Requests of one turn: seconds to the first and last token, and tokens per second."""

    first: Sequence[float]
    whole: Sequence[float]
    throughput: float

    def figures(self) -> dict[str, float]:
        """Return the percentiles in milliseconds and the throughput."""
        named = {"first_token": self.first, "request": self.whole}
        shown = {f"{name}_p{p}_ms": 1000 * percentile(of, p) for name, of in named.items() for p in (50, 99)}
        return {name: round(value, 1) for name, value in shown.items()} | {"tokens_s": round(self.throughput, 1)}


def percentile(values: Sequence[float], percent: int) -> float:
    """Return a percentile: the next larger value."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)]


def make_model(folder: Path, hidden: int, layers: int) -> None:
    """Save a Llama with random weights and a byte tokenizer."""
    import torch
    from transformers import ByT5Tokenizer, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": hidden, "intermediate_size": 2 * hidden, "num_hidden_layers": layers}
    ends = {
        "pad_token_id": 0,
        "bos_token_id": 2,
        "eos_token_id": None,
    }  # so that each request generates all of its tokens
    LlamaForCausalLM(LlamaConfig(vocab_size=384, num_attention_heads=4, **sizes, **ends)).save_pretrained(folder)
    ByT5Tokenizer().save_pretrained(folder)


@contextmanager
def model_server(folder: Path, device: str, threads: int, **variables: str) -> Iterator[str]:
    """Run the example during the block. Yield its URL."""
    port = free_port()
    command = [sys.executable, "-W", "ignore", str(EXAMPLE), str(folder), device, str(port)]
    process = subprocess.Popen(
        command, env=plain_environment(**variables) | {"OMP_NUM_THREADS": str(threads)}, stderr=subprocess.DEVNULL
    )
    try:
        yield f"http://localhost:{port}/generate"
    finally:
        process.terminate()
        process.wait(60)


async def request(session: aiohttp.ClientSession, url: str, prompt: str) -> tuple[float, float, list[int]]:
    """Send a request. Return the seconds to its first token and in all, and its tokens."""
    began, first, tokens = time.perf_counter(), 0.0, list[int]()
    async with session.post(url, json={"prompt": prompt, "tokens": TOKENS}) as response:
        response.raise_for_status()
        async for line in response.content:
            first = first or time.perf_counter() - began
            tokens.append(json.loads(line)["token"])
    return first, time.perf_counter() - began, tokens


async def wait_until_ready(url: str) -> None:
    """Wait until the server answers, then send each prompt once."""
    deadline = time.monotonic() + START_SECONDS
    async with aiohttp.ClientSession() as session:
        while True:
            try:
                await request(session, url, PROMPTS[0])
                break
            except aiohttp.ClientError:
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(0.5)
        await asyncio.gather(*[request(session, url, prompt) for prompt in PROMPTS])


async def load(url: str, clients: int, seconds: float, answers: dict[str, set[tuple[int, ...]]]) -> Turn:
    """Send requests from `clients` clients for some seconds. Add each answer to `answers` of its prompt."""
    first, whole, count = list[float](), list[float](), 0

    async def client(number: int) -> None:
        nonlocal count
        chosen = random.Random(number)
        async with aiohttp.ClientSession() as session:
            while time.perf_counter() < until:
                prompt = chosen.choice(PROMPTS)
                one, every, tokens = await request(session, url, prompt)
                assert len(tokens) == TOKENS
                count += len(tokens)
                first.append(one)
                whole.append(every)
                answers.setdefault(prompt, set()).add(tuple(tokens))

    began = time.perf_counter()
    until = began + seconds
    await asyncio.gather(*map(client, range(clients)))
    return Turn(first, whole, count / (time.perf_counter() - began))


def compare(rounds: Sequence[tuple[Turn, Turn]]) -> dict[str, object]:
    """Return the figures of local and remote, and the ratios."""
    local, remote = ([one[side] for one in rounds] for side in (0, 1))
    p99 = statistics.median(percentile(r.whole, 99) / percentile(b.whole, 99) for b, r in rounds)
    throughput = statistics.median(r.throughput / b.throughput for b, r in rounds)
    together = [
        Turn(
            [x for t in some for x in t.first],
            [x for t in some for x in t.whole],
            statistics.median(t.throughput for t in some),
        )
        for some in (local, remote)
    ]
    return {
        "local": together[0].figures(),
        "remote": together[1].figures(),
        "p99_ratio": round(p99, 3),
        "throughput_ratio": round(throughput, 3),
        "bars": {"p99_ratio": MOST_P99, "throughput_ratio": LEAST_THROUGHPUT},
        "met": p99 <= MOST_P99 and throughput >= LEAST_THROUGHPUT,
    }


async def measure(
    urls: Sequence[str], clients: int, rounds: int, seconds: float
) -> tuple[list[tuple[Turn, Turn]], int]:
    """Load both servers in turns. Return the turns of each round, and the number of prompts with more than one answer."""
    for url in urls:
        await wait_until_ready(url)
    answers: dict[str, set[tuple[int, ...]]] = {}
    found = []
    for number in range(rounds):
        order = (0, 1) if number % 2 == 0 else (1, 0)
        turns = {side: await load(urls[side], clients, seconds, answers) for side in order}
        found.append((turns[0], turns[1]))
        print(json.dumps({"round": number, "local": turns[0].figures(), "remote": turns[1].figures()}), flush=True)
    return found, sum(len(one) > 1 for one in answers.values())


def main() -> None:
    """Measure, and print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, kind, default in (
        ("clients", int, 8),
        ("rounds", int, 6),
        ("seconds", float, 10.0),
        ("hidden", int, 512),
        ("layers", int, 8),
        ("threads", int, os.cpu_count()),
    ):
        parser.add_argument(f"--{name}", type=kind, default=default)
    asked = parser.parse_args()
    before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as text, ExitStack() as stack:
        folder = Path(text)
        make_model(folder / "model", asked.hidden, asked.layers)
        (folder / "server").mkdir()
        server = stack.enter_context(served())
        remote = {"DJINN_SERVERS": server.tcp, "DJINN_TOKEN": server.token}
        servers = [
            stack.enter_context(model_server(folder / "model", "cpu", asked.threads)),
            stack.enter_context(model_server(folder / "model", "remote_accelerator:0", 1, **remote)),
        ]
        found, differing = asyncio.run(measure(servers, asked.clients, asked.rounds, asked.seconds))
    print(json.dumps({"load_before": before, **compare(found), "differing": differing}, indent=2))


if __name__ == "__main__":
    main()
