"""`examples/model_server.py`: requests that arrive together are generated together, and each gets its own tokens."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import logging
from pathlib import Path

import aiohttp
import pytest
import torch
from free_ports import free_port
from transformers import ByT5Tokenizer, LlamaConfig, LlamaForCausalLM

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "model_server.py"


@pytest.fixture
def example():
    spec = importlib.util.spec_from_file_location("model_server", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def model():
    torch.manual_seed(0)
    sizes = {"vocab_size": 384, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    ends = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": None}
    return LlamaForCausalLM(LlamaConfig(**sizes, **ends, num_attention_heads=2)).eval()


@pytest.fixture(autouse=True)
def _quiet():
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)


@pytest.fixture
def tokenizer():
    found = ByT5Tokenizer()
    found.pad_token = None  # as GPT-2's
    return found


def local_tokens(model, tokenizer, prompt, length):
    """Return the tokens that the model generates on the CPU."""
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    return model.generate(ids, max_new_tokens=length, do_sample=False)[0, ids.shape[1] :].tolist()


async def post(session, port, **body):
    """Post a request. Return its status and the tokens of the response."""
    async with session.post(f"http://localhost:{port}/generate", **body) as response:
        tokens = [json.loads(line)["token"] async for line in response.content] if response.status == 200 else []
        return response.status, tokens


async def with_server(example, model, tokenizer, use):
    """Serve the model. Call `use` with a function that posts requests, and return its result."""
    port = free_port()
    serving = asyncio.create_task(example.serve(model.to("remote_accelerator:0"), tokenizer, port))
    async with aiohttp.ClientSession() as session:
        while True:
            try:
                await post(session, port)
                break
            except aiohttp.ClientConnectorError:
                await asyncio.sleep(0.01)
        found = await use(lambda **body: post(session, port, **body))
    assert not serving.done()
    serving.cancel()
    return found


def test_concurrent_requests_get_local_tokens(example, model, tokenizer, monkeypatch):
    batches = []
    asked = [("xyz", 3), ("zzzzzz", 5), ("Q", 4)]
    expected = [(200, local_tokens(model, tokenizer, *one)) for one in asked]
    run = example.Batch.run
    monkeypatch.setattr(
        example.Batch, "run", lambda batch, *given: batches.append(len(batch.prompts)) or run(batch, *given)
    )

    async def post_requests(post):
        requests = [{"prompt": prompt, "tokens": length} for prompt, length in asked]
        return await post(json=requests[0]), await asyncio.gather(*[post(json=request) for request in requests])

    first, found = asyncio.run(with_server(example, model, tokenizer, post_requests))
    assert first == expected[0]
    assert found == expected
    assert max(batches) >= 2


def test_prompt_ends_at_eos_within_batch(example, model):
    tokenizer, prompts = ByT5Tokenizer(), ("xyz", "a longer prompt")
    short, long = (local_tokens(model, tokenizer, prompt, 8) for prompt in prompts)
    eos = short[2]
    assert eos not in long
    sent = [[], []]
    model.generation_config.eos_token_id = [eos, 383]
    batch = example.Batch([(prompt, 8, tokens.append) for prompt, tokens in zip(prompts, sent, strict=True)])
    batch.run(model.to("remote_accelerator:0"), tokenizer)
    ended, full = ([token for token in tokens if token is not None] for tokens in sent)
    assert ended == short[: short.index(eos) + 1]
    assert full == long
    assert [tokens.index(None) for tokens in sent] == [len(ended), 8], "no token follows the end"


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"json": {"prompt": "a", "tokens": 0}}, 400),
        ({"json": {"prompt": "a", "tokens": "3"}}, 400),
        ({"json": {"prompt": ["a"], "tokens": 3}}, 400),
        ({"json": {"prompt": "a", "tokens": 1.5}}, 400),
        ({"json": {"prompt": "a", "tokens": 1025}}, 400),
        ({"json": {"prompt": 1025 * "a", "tokens": 3}}, 400),
        ({"json": {"prompt": "\ud800", "tokens": 3}}, 400),
        ({"json": ["a"]}, 400),
        ({"data": "{", "headers": {"Content-Type": "application/json"}}, 400),
        ({"data": '{"prompt": "a", "tokens": 3}'}, 415),
    ],
)
def test_invalid_request_is_refused(example, model, tokenizer, body, status):
    async def use(post):
        return await post(**body), await post(json={"prompt": "a", "tokens": 2})

    refused, served = asyncio.run(with_server(example, model, tokenizer, use))
    assert refused == (status, [])
    assert (served[0], len(served[1])) == (200, 2)


def test_failed_batch_fails_its_requests_only(example, model, tokenizer, monkeypatch, caplog):
    run = example.Batch.run

    def fail_once(batch, model, tokenizer):
        monkeypatch.setattr(example.Batch, "run", run)
        raise RuntimeError("out of memory")

    monkeypatch.setattr(example.Batch, "run", fail_once)

    async def use(post):
        return [await post(json={"prompt": "a", "tokens": 2}) for _ in range(2)]

    failed, served = asyncio.run(with_server(example, model, tokenizer, use))
    assert failed == (200, [])
    assert (served[0], len(served[1])) == (200, 2)
    assert "out of memory" in caplog.text
