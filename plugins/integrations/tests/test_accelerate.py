"""accelerate selects the remote device, trains on it, and splits and offloads models."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import djinn

REMOTE = "remote_accelerator:0"
ROWS = torch.randn(32, 8, generator=torch.Generator().manual_seed(0))
LABELS = torch.randint(0, 4, (32,), generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def _embedded_device(embedded):
    assert embedded == REMOTE


@pytest.fixture
def make_accelerator():
    """Return a new `Accelerator`, as in a new process."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    def make_accelerator(**options):
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        return Accelerator(**options)

    yield make_accelerator
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.0), nn.Linear(16, 4))


def train(accelerator):
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    data = DataLoader(TensorDataset(ROWS, LABELS), batch_size=8)
    model, optimizer, data, schedule = accelerator.prepare(model, optimizer, data, schedule)
    losses = []
    for rows, labels in data:
        assert rows.device == accelerator.device
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(rows), labels)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
    with torch.no_grad():
        answers = accelerator.gather_for_metrics(model(ROWS.to(accelerator.device)))
    return torch.stack(losses).cpu(), answers.float().cpu(), model


@pytest.mark.parametrize("options", [{"gradient_accumulation_steps": 2}, {"mixed_precision": "bf16"}])
def test_accelerate_training_equals_local(make_accelerator, options):
    expected, answered, _ = train(make_accelerator(cpu=True, **options))
    accelerator = make_accelerator(**options)
    assert accelerator.device == torch.device(REMOTE)
    losses, answers, _ = train(accelerator)
    tolerance = 2e-2 if "mixed_precision" in options else 1e-4
    torch.testing.assert_close(losses, expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(answers, answered, rtol=tolerance, atol=tolerance)


def test_saved_state_includes_random_states(make_accelerator, tmp_path):
    accelerator = make_accelerator()
    _, _, model = train(accelerator)
    accelerator.save_state(tmp_path)
    weights = {name: value.cpu() for name, value in model.state_dict().items()}
    drawn = torch.rand(3, device=REMOTE).tolist()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    accelerator.load_state(tmp_path)
    torch.testing.assert_close({name: value.cpu() for name, value in model.state_dict().items()}, weights)
    assert torch.rand(3, device=REMOTE).tolist() == drawn


def test_state_saved_on_server_is_not_downloaded(make_accelerator, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    accelerator = make_accelerator()
    _, _, model = train(accelerator)
    (optimizer,) = accelerator._optimizers
    accelerator.save_state(f"file:{tmp_path}/there")
    assert sorted(path.name for path in (tmp_path / "there").iterdir()) == [
        "model.safetensors",
        "optimizer.bin.safetensors",
    ]
    before = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    djinn.reset_stats()
    accelerator.load_state(f"file:{tmp_path}/there")
    assert djinn.stats()["bytes_uploaded"] == torch.get_rng_state().nbytes
    torch.testing.assert_close((model.state_dict(), optimizer.state_dict()), before, rtol=0, atol=0)


def test_device_maps_use_device_memory():
    from accelerate import infer_auto_device_map
    from accelerate.utils import get_max_memory

    found = get_max_memory()
    assert list(found) == [0, "cpu"]
    assert found[0] > 0
    assert infer_auto_device_map(network()) == {"": 0}
    assert get_max_memory({"cpu": "1KB", 0: "2KB"}) == {0: 2000, "cpu": 1000}


def assert_equals_local(model):
    with torch.no_grad():
        torch.testing.assert_close(model(ROWS.to(REMOTE)).cpu(), network()(ROWS), rtol=1e-4, atol=1e-5)


def test_device_map_splits_model(tmp_path):
    from accelerate import dispatch_model, init_empty_weights, load_checkpoint_and_dispatch
    from safetensors.torch import save_file

    assert_equals_local(dispatch_model(network(), {"0": 0, "1": 0, "2": 0, "3": "cpu"}, main_device=0))
    save_file(network().state_dict(), tmp_path / "model.safetensors", metadata={"format": "pt"})
    for where in ("auto", {"": REMOTE}, {"0": REMOTE, "1": REMOTE, "2": REMOTE, "3": "disk"}):
        with init_empty_weights():
            model = network()
        options = {"device_map": where, "offload_folder": tmp_path / "offloaded"}
        assert_equals_local(load_checkpoint_and_dispatch(model, str(tmp_path / "model.safetensors"), **options))


def test_cpu_offload_equals_local():
    from accelerate import cpu_offload, cpu_offload_with_hook

    assert_equals_local(cpu_offload(network(), execution_device=REMOTE))
    model, hook = cpu_offload_with_hook(network(), execution_device=REMOTE)
    assert_equals_local(model)
    assert next(model.parameters()).device == torch.device(REMOTE)
    hook.offload()
    assert next(model.parameters()).device == torch.device("cpu")
    assert copy.deepcopy(model)(ROWS).device == torch.device(REMOTE), "the hook moves it again"
