"""Executors on the device, with a client in this process."""

from __future__ import annotations

import copy
import sys

import pytest
import torch
from configured import configured
from servers import fresh_python, started

import djinn
from djinn.testing import executor_figures
from djinn_fakegpu.library import build

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
REMOTE = "remote_accelerator:0"


@pytest.fixture(scope="module", autouse=True)
def server(tmp_path_factory, plain_environment):
    build()  # on a busy machine it takes longer than an executor may take to start
    folder = tmp_path_factory.mktemp("server")
    command = [
        "-m",
        "djinn_core.cli",
        "serve",
        "--connection-file",
        folder / "connection.json",
        "--device",
        "fakegpu",
        "--threads",
        "1",
    ]
    server = started(fresh_python, command, folder, plain_environment)
    with configured(servers=[server.url("tcp")], token=server.token, disable=("local",)):
        yield server
    assert server.stop() == 0, server.log.read_text()


def counted(work):
    """How much each counter of the device grows while `work` runs."""
    before = executor_figures()
    work()
    after = executor_figures()
    return {
        name.removeprefix("device_"): after[name] - before.get(name, 0) for name in after if name.startswith("device_")
    }


def train(device):
    torch.manual_seed(3)
    model = torch.nn.Sequential(
        torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.LayerNorm(32), torch.nn.Linear(32, 5)
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(4):
        inputs, labels = torch.randn(8, 16).to(device), torch.randint(5, (8,)).to(device)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    return [value.cpu() for value in model.state_dict().values()]


def test_session_is_on_the_device():
    assert torch.get_device_module(REMOTE).get_device_properties(0).name == "Fake GPU"


def test_training_equals_the_cpu():
    for there, here in zip(train(REMOTE), train("cpu"), strict=True):
        assert torch.equal(there, here)


def test_convolutions_equal_the_cpu():
    torch.manual_seed(5)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU(), torch.nn.MaxPool2d(2)
    ).eval()
    images = torch.randn(2, 3, 12, 12)
    with torch.no_grad():
        assert torch.equal(copy.deepcopy(model).to(REMOTE)(images.to(REMOTE)).cpu(), model(images))


def test_generated_tokens_equal_the_cpu():
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(1)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=384, n_positions=128, n_embd=64, n_layer=2, n_head=4)).eval()
    prompt = torch.randint(0, 384, (2, 12))

    def generate(model, prompt, **options):
        options = {
            "attention_mask": torch.ones_like(prompt),
            "pad_token_id": 0,
            "max_new_tokens": 12,
            "min_new_tokens": 12,
            **options,
        }
        torch.manual_seed(5)
        return model.generate(prompt, **options).tolist()

    remote = copy.deepcopy(model).to(REMOTE)
    for options in ({"do_sample": False}, {"do_sample": True, "top_k": 20}):
        assert generate(remote, prompt.to(REMOTE), **options) == generate(model, prompt, **options)


def test_uploads_and_downloads_share_page_locked_blocks():
    """A session's ops run in inference mode. Parts of an upload arrive outside of it."""
    small = torch.randn(100_000)
    assert torch.equal((small.to(REMOTE) + 0).cpu(), small)
    large = torch.randn(6 << 20)
    assert torch.equal(large.to(REMOTE).cpu(), large)
    assert executor_figures()["device_pinned_bytes_peak"] <= 64 << 20


def test_counters_reach_the_client():
    value = torch.ones(1000).to(REMOTE)
    djinn.synchronize()

    def fetch():
        (value * 2 + 1).cpu()

    found = counted(fetch)
    assert found["launches"] == 2
    assert sum(found[name] for name in found if name.startswith("bytes_device_to")) == 4000
    assert found["synchronizations"] >= 1
