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
def doomed(start_python, plain_environment, tmp_path_factory):
    """A server that is killed, which keeps nothing on its disk: its process, and its connection file."""
    options = ["--threads", "1", "--drain-seconds", "0", "--store-gib", "0"]
    server = start_server(start_python, tmp_path_factory.mktemp("doomed"), *options, env=plain_environment)
    yield server.process, read_connection_file(server.file)
    server.stop(signal.SIGKILL)


@pytest.fixture
def remote(doomed, serving, tmp_path):
    """The device is the doomed server's; the one that all tests share stands by."""
    file = tmp_path / "standby.json"
    write_connection_file(file, serving)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    urls = [url for url in doomed[1].urls if url.startswith("tcp")]
    djinn.shut_down()
    djinn.configure(
        servers=urls,
        token=doomed[1].token,
        standby=[str(file)],
        standby_seconds=0.2,
        disable=("local",),
        progress=False,
    )
    begin()
    yield REMOTE
    djinn.shut_down()
    djinn.configure()
    torch.set_num_threads(threads)


def begin():
    """Begin a session, once the executor that was killed before is there again."""
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


def trained(device, at_step_12=lambda: None):
    """Losses of a few steps with dropout and AdamW."""
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
    expected = trained(remote)
    assert trained(remote, kill_executor) == expected
    assert open_connections()[0].connection.server in serving.urls
    assert trained(remote) == expected


class Killer:
    """Stands where tokens are shown, and kills at the eighth."""

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


def test_generation_fails_over_from_last_state(remote, doomed, serving, monkeypatch):
    from transformers import LlamaConfig, LlamaForCausalLM

    monkeypatch.setattr(snapshot_schedule, "SNAPSHOT_SECONDS", 0.0)
    monkeypatch.setattr(snapshot_schedule, "PAUSE_FACTOR", 0)  # a state before every submission
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 100}
    model = LlamaForCausalLM(LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **sizes)).eval().to(remote)
    prompt = torch.randint(0, 100, (1, 12)).to(remote)

    def generated(process):
        return model.generate(prompt, max_new_tokens=16, do_sample=False, pad_token_id=0, streamer=Killer(process))

    expected = generated(None).tolist()
    talk = open_connections()[0].connection
    assert generated(doomed[0]).tolist() == expected
    assert talk.server in serving.urls
    assert talk.bytes_sent > 0
    talk._failover_log._schedule.due = 0.0
    assert generated(None).tolist() == expected
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
