"""A session over `djinn serve --transport ucx=PORT`, with results equal to local ones."""

from __future__ import annotations

import copy
import gc
import json
import sys
import time
from pathlib import Path

import pytest
import torch

import djinn

pytest.importorskip("ucxx")
sys.path.insert(0, str(Path(__file__).parents[3] / "tests" / "shared"))
from free_ports import free_port
from servers import fresh_python, start_server

from djinn_ucx.connection import UcxConnection

REMOTE = "remote_accelerator:0"
SECONDS = 240.0


@pytest.fixture(params=["ucx", "ucxs"])
def device(request, tmp_path, plain_environment):
    """Yield the device, connected by this URL scheme."""
    port = free_port()
    options = ["--threads", "1", "--drain-seconds", "1", "--store-gib", "0", "--transport", f"ucx={port}"]
    options += ["--tls-self-signed"] if request.param == "ucxs" else []
    server = start_server(fresh_python, tmp_path, *options, env=plain_environment)
    djinn.shut_down()
    where = {"tls_fingerprints": json.loads(server.file.read_text())["fingerprint"]} if request.param == "ucxs" else {}
    djinn.configure(
        servers=[f"{request.param}://127.0.0.1:{port}"],
        token=server.token,
        plugins=["ucx", "tcp"],
        disable=("local",),
        **where,
    )
    yield REMOTE
    djinn.shut_down()
    djinn.configure()
    server.stop()


def connections():
    return [one for one in gc.get_objects() if isinstance(one, UcxConnection)]


def ucx_bytes():
    """Return the bytes sent and received over UCX."""
    return sum(one._beside_sent for one in connections()), sum(one._beside_received for one in connections())


def losses(device):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(512, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 4)).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    found = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = model(torch.ones(4, 512, device=device)).square().mean()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found, model[0].weight.detach().cpu()


def generate(device, model):
    here = copy.deepcopy(model).to(device)
    ids = torch.arange(1, 9).reshape(1, -1).to(device)
    with torch.no_grad():
        return here.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False).tolist()


def test_session_results_equal_local(device):
    from transformers import LlamaConfig, LlamaForCausalLM

    djinn.init()
    sent = torch.rand(1 << 20)
    deadline = time.monotonic() + SECONDS
    while not any(one.over_ucx for one in connections()):  # the first buffers use the socket
        assert time.monotonic() < deadline
        assert torch.equal(sent.to(device).cpu(), sent)
    before = ucx_bytes()
    (expected, weight), (found, far) = losses("cpu"), losses(device)
    assert found == expected
    assert torch.equal(weight, far)
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=512, pad_token_id=0, **sizes)).eval()
    assert generate(device, model) == generate("cpu", model)
    assert all(now > then + (1 << 20) for now, then in zip(ucx_bytes(), before, strict=True))
