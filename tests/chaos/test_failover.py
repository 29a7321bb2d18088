"""A server that is lost takes nothing with it: another one goes on with the session. Real servers, real kills."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
from servers import start_server

import djinn
from djinn.testing import open_connections
from djinn_client.runtime import client
from djinn_core.protocol.connection_file import read_connection_file, write_connection_file
from djinn_core.protocol.delivery import snapshot_schedule

REMOTE = "remote_accelerator:0"


@pytest.fixture(scope="module")
def doomed_server(start_python, plain_environment, tmp_path_factory):
    """Yield the process and connection file of a server that the test kills. It keeps nothing on disk."""
    options = ["--threads", "1", "--drain-seconds", "0", "--store-gib", "0"]
    server = start_server(start_python, tmp_path_factory.mktemp("doomed"), *options, env=plain_environment)
    yield server.process, read_connection_file(server.file)
    server.stop(signal.SIGKILL)


@pytest.fixture
def remote(doomed_server, serving, tmp_path):
    """Let `remote_accelerator` be the doomed server's device, with the shared server as standby."""
    file = tmp_path / "standby.json"
    write_connection_file(file, serving)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    urls = [url for url in doomed_server[1].urls if url.startswith("tcp")]
    djinn.shut_down()
    djinn.configure(
        servers=urls,
        token=doomed_server[1].token,
        standby=[str(file)],
        standby_seconds=0.2,
        disable=("local",),
        progress=False,
    )
    open_session()
    yield REMOTE
    djinn.shut_down()
    djinn.configure()
    torch.set_num_threads(threads)


def open_session():
    """Open a session. Retry until the executor that an earlier test killed has restarted."""
    deadline = time.monotonic() + 300
    while True:
        try:
            djinn.init()
        except djinn.DjinnError:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        else:
            return


def kill_executor():
    os.kill(client.executor_process(), signal.SIGKILL)


def train(device, at_step_12=lambda: None):
    """Return losses of a few steps with dropout and AdamW."""
    torch.manual_seed(5)
    layers = [torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(64, 4)]
    model = torch.nn.Sequential(*layers).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    x, y = torch.randn(64, 32).to(device), torch.randint(0, 4, (64,)).to(device)
    torch.manual_seed(6)
    losses = []
    for step in range(25):
        if step == 12:
            at_step_12()
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_training_fails_over_to_standby(remote, serving):
    expected = train(remote)
    assert train(remote, kill_executor) == expected
    assert open_connections()[0].connection.server in serving.urls
    assert train(remote) == expected


class KillingStreamer:
    """A token streamer that kills the server and its executor at the eighth token."""

    def __init__(self, process):
        self.process, self.tokens = process, 0

    def put(self, _):
        self.tokens += 1
        if self.tokens == 8 and self.process is not None:
            executor = client.executor_process()
            self.process.kill()
            os.kill(executor, signal.SIGKILL)

    def end(self):
        pass


def test_generation_fails_over_from_last_state(remote, doomed_server, serving, monkeypatch):
    from transformers import LlamaConfig, LlamaForCausalLM

    monkeypatch.setattr(snapshot_schedule, "SNAPSHOT_SECONDS", 0.0)
    monkeypatch.setattr(snapshot_schedule, "PAUSE_FACTOR", 0)  # a state before every submission
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 100}
    model = LlamaForCausalLM(LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **sizes)).eval().to(remote)
    prompt = torch.randint(0, 100, (1, 12)).to(remote)

    def generate(process):
        return model.generate(
            prompt, max_new_tokens=16, do_sample=False, pad_token_id=0, streamer=KillingStreamer(process)
        )

    expected = generate(None).tolist()
    talk = open_connections()[0].connection
    assert generate(doomed_server[0]).tolist() == expected
    assert talk.server in serving.urls
    assert talk.bytes_sent > 0
    talk._failover_log._schedule.due = 0.0
    assert generate(None).tolist() == expected
    assert talk._failover_log.base > 0  # states were taken


def test_cancelled_program_fails_over_at_same_op(remote, serving):
    whole, product = torch.ones(4, device=remote), torch.rand(512, 512, device=remote)
    djinn.synchronize()
    with pytest.raises(djinn.errors.DeadlineExceeded), djinn.deadline(0.5):
        for _ in range(2000):
            product = product @ product / product.sum()
        product.sum().item()
    with pytest.raises(djinn.errors.ProgramStopped):
        product.sum().item()
    whole += 1
    kill_executor()
    assert whole.tolist() == [2] * 4
    assert open_connections()[0].connection.server in serving.urls
    with pytest.raises(djinn.errors.ProgramStopped):
        product.sum().item()
