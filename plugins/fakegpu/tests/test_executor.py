"""Executors on the fake GPU, with a client in this process."""

from __future__ import annotations

import copy
import sys

import pytest
import torch
from configured import configured

from djinn.testing import executor_figures
from djinn_fakegpu.library import build
from djinn_fakegpu.remote_control import RemoteControl
from evaluation.fakegpu import run_fakegpu as counting

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
REMOTE = "remote_accelerator:0"
# Loads the device. A file with the name of a fault injects the fault.
PLANTED = """
from pathlib import Path
from djinn.hooks import hookimpl
from djinn_fakegpu.device import FakeGpuDevice, Settings

djinn_api_version = "2.0"
here = Path(__file__).parent

class Planted(FakeGpuDevice):
    def open(self, index):
        runtime = super().open(index)
        mark, commit = runtime.mark, runtime.commit
        def planted_mark(**options):
            if (here / "synchronization").exists():
                runtime.synchronize()
            return mark(**options)
        def planted_commit(target):
            return target if (here / "missing-wait").exists() and target.device.type != "cpu" else commit(target)
        runtime.mark, runtime.commit = planted_mark, planted_commit
        return runtime

@hookimpl
def djinn_register_devices(settings):
    return [Planted(Settings(control=str(here)))]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("server")


@pytest.fixture(scope="module", autouse=True)
def server(python, folder, plain_environment):
    build()  # on a busy machine, the build takes longer than the start timeout of an executor
    (folder / "planted.py").write_text(PLANTED)
    environment = plain_environment | {"DJINN_PLUGINS": "tcp,planted", "PYTHONPATH": str(folder)}
    with (
        counting.serving(folder, environment, start=python.start) as server,
        configured(servers=[server.url("tcp")], token=server.token, disable=("local",)),
    ):
        yield server


@pytest.fixture
def inject_fault(folder):
    """Yield a function that injects faults until the test ends."""
    files = []

    def planted(fault):
        files.append(folder / fault)
        files[-1].touch()

    yield planted
    for file in files:
        file.unlink()


def test_session_runs_on_fake_device():
    assert torch.get_device_module(REMOTE).get_device_properties(0).name == "Fake GPU"


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


def test_training_equals_cpu():
    for there, here in zip(train(REMOTE), train("cpu"), strict=True):
        assert torch.equal(there, here)


def test_convolutions_equal_cpu():
    torch.manual_seed(5)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU(), torch.nn.MaxPool2d(2)
    ).eval()
    images = torch.randn(2, 3, 12, 12)
    with torch.no_grad():
        assert torch.equal(copy.deepcopy(model).to(REMOTE)(images.to(REMOTE)).cpu(), model(images))


def test_generated_tokens_equal_cpu():
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
    """A session's ops run in inference mode, but parts of an upload arrive outside of it."""
    small = torch.randn(100_000)
    assert torch.equal((small.to(REMOTE) + 0).cpu(), small)
    large = torch.randn(6 << 20)
    assert torch.equal(large.to(REMOTE).cpu(), large)
    assert executor_figures()["device_pinned_bytes_peak"] <= 64 << 20


def test_device_counters_reach_client():
    value = torch.ones(1000).to(REMOTE)

    def fetch():
        (value * 2 + 1).cpu()

    grew = counting.count_increases(fetch)
    assert grew("launches") == 2
    assert grew("bytes_device_to_host") == 4000
    assert grew("synchronizations") == 1


def test_short_evaluation_meets_its_limits(folder):
    figures = counting.decode_figures(4) | counting.train_figures(2)
    figures |= counting.transfer_figures(24) | counting.overlap_figures(32, RemoteControl(folder))
    assert not counting.missed(figures), figures
    assert figures["moved_bytes"] == 48 << 20
    assert figures["train_launches_per_step"] > 100


def test_injected_synchronization_changes_counters(inject_fault):
    decoded, trained = counting.decode_figures(2), counting.train_figures(2)
    inject_fault("synchronization")
    assert counting.decode_figures(2)["decode_syncs_per_token"] >= decoded["decode_syncs_per_token"] + 1
    assert counting.train_figures(2)["train_syncs_per_step"] > trained["train_syncs_per_step"]


def test_injected_upload_without_wait_raises(inject_fault):
    inject_fault("missing-wait")
    there = torch.ones(2 << 20).to(REMOTE)
    with pytest.raises(RuntimeError, match="missing wait: aten::mul"):
        (there * 2).cpu()
