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


def test_concurrent_requests_get_the_tokens_of_the_local_model(example, model, monkeypatch):
    tokenizer, port, batches = ByT5Tokenizer(), free_port(), []
    asked = [("one", 3), ("a longer prompt", 5), ("two", 4)]
    expected = []
    for prompt, length in asked:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        found = model.generate(ids, max_new_tokens=length, do_sample=False)
        expected.append(found[0, ids.shape[1] :].tolist())
    run = example.Batch.run
    monkeypatch.setattr(
        example.Batch, "run", lambda batch, *given: batches.append(len(batch.prompts)) or run(batch, *given)
    )
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)

    async def request(session, prompt, length):
        body = {"prompt": prompt, "tokens": length}
        async with session.post(f"http://localhost:{port}/generate", json=body) as response:
            return [json.loads(line)["token"] async for line in response.content]

    async def everything():
        serving = asyncio.create_task(example.serve(model.to("remote_accelerator:0"), tokenizer, port))
        async with aiohttp.ClientSession() as session:
            while True:
                try:
                    first = await request(session, *asked[0])
                    break
                except aiohttp.ClientConnectorError:
                    await asyncio.sleep(0.01)
            found = await asyncio.gather(*[request(session, *one) for one in asked])
        serving.cancel()
        return first, found

    first, found = asyncio.run(everything())
    assert first == expected[0]
    assert found == expected
    assert max(batches) >= 2
