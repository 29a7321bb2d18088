"""Pipelines and models whose weights only the server has."""

from __future__ import annotations

import shutil

import pytest
import torch
from configured import configured
from diffusion_models import stable_diffusion
from servers import start_server

import djinn

REMOTE = "remote_accelerator:0"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning:diffusers.*"),
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The `local_dir_use_symlinks`:UserWarning"),  # diffusers passes this argument
]


@pytest.fixture(scope="module")
def caches(tmp_path_factory):
    """Return two hub caches: the server's with a whole pipeline, the client's without weights."""
    server, client = tmp_path_factory.mktemp("server"), tmp_path_factory.mktemp("client")
    snapshot = server / "models--org--pipe" / "snapshots" / COMMIT
    stable_diffusion().save_pretrained(snapshot, max_shard_size="20KB")
    (server / "models--org--pipe" / "refs").mkdir()
    (server / "models--org--pipe" / "refs" / "main").write_text(COMMIT)
    weights = shutil.ignore_patterns("*.safetensors", "*.index.json")
    shutil.copytree(server, client, ignore=weights, dirs_exist_ok=True)
    return server, client


@pytest.fixture(scope="module")
def model_server(caches, tmp_path_factory, python, plain_environment):
    folder = tmp_path_factory.mktemp("served")
    options = ("--models", str(caches[0]), "--save-weights", str(folder), "--threads", "1")
    server = start_server(python.start, folder, *options, env=plain_environment)
    with configured(connection_file=server.file):
        djinn.init()
        yield server
    server.stop()


def image(pipeline):
    pipeline.set_progress_bar_config(disable=True)
    options = {"height": 16, "width": 16, "num_inference_steps": 2, "output_type": "np"}
    return torch.tensor(pipeline("a cat", generator=torch.Generator().manual_seed(0), **options).images)


def weights_of(pipeline):
    modules = [part for part in pipeline.components.values() if isinstance(part, torch.nn.Module)]
    return [parameter for module in modules for parameter in module.parameters()]


@pytest.mark.usefixtures("model_server")
def test_pipeline_is_loaded_by_server(caches):
    from diffusers import DiffusionPipeline

    expected = image(stable_diffusion())
    djinn.reset_stats()
    found = DiffusionPipeline.from_pretrained("org/pipe", cache_dir=caches[1], local_files_only=True, device_map=REMOTE)
    weights = weights_of(found)
    assert {weight.device for weight in weights} == {torch.device(REMOTE)}
    djinn.synchronize()
    stats = djinn.stats()
    assert stats["bytes_read"] >= sum(weight.nbytes for weight in weights)
    assert stats["bytes_uploaded"] < 5000
    for one, other in zip(weights, weights_of(stable_diffusion()), strict=True):
        assert torch.equal(one.cpu(), other)
    torch.testing.assert_close(image(found), expected)


@pytest.mark.usefixtures("model_server")
def test_pipeline_model_in_other_dtype(caches):
    from diffusers import UNet2DConditionModel

    options = {"subfolder": "unet", "local_files_only": True, "torch_dtype": torch.bfloat16}
    local = UNet2DConditionModel.from_pretrained("org/pipe", cache_dir=caches[0], **options)
    djinn.reset_stats()
    found = UNet2DConditionModel.from_pretrained("org/pipe", cache_dir=caches[1], device_map=REMOTE, **options)
    assert djinn.stats()["bytes_uploaded"] < 5000
    for (name, one), (_, other) in zip(found.state_dict().items(), local.state_dict().items(), strict=True):
        assert torch.equal(one.cpu(), other), name


@pytest.mark.usefixtures("model_server")
def test_pipeline_is_saved_at_server_address(caches, tmp_path, monkeypatch):
    from diffusers import DiffusionPipeline

    monkeypatch.chdir(tmp_path)
    made = DiffusionPipeline.from_pretrained("org/pipe", cache_dir=caches[1], local_files_only=True, device_map=REMOTE)
    for part in made.components.values():
        if isinstance(part, torch.nn.Module):
            with torch.no_grad():
                for weight in part.parameters():
                    weight.mul_(0.5)
    expected = image(made)
    djinn.reset_stats()
    made.save_pretrained("file:run/pipe")
    again = DiffusionPipeline.from_pretrained("file:run/pipe", device_map=REMOTE)
    assert djinn.stats()["bytes_uploaded"] < 5000
    assert djinn.stats()["bytes_received"] < 100_000
    assert torch.equal(image(again), expected)


def test_missing_weights_are_uploaded(model_server, caches):
    from diffusers import DiffusionPipeline

    with configured(connection_file=model_server.file, weights_from="client"):
        djinn.reset_stats()
        found = DiffusionPipeline.from_pretrained(
            "org/pipe", cache_dir=caches[0], local_files_only=True, device_map=REMOTE
        )
        assert djinn.stats()["bytes_read"] == 0
        torch.testing.assert_close(image(found), image(stable_diffusion()))
        with pytest.raises(OSError, match=r"no file named (diffusion_pytorch_)?model\."):
            DiffusionPipeline.from_pretrained("org/pipe", cache_dir=caches[1], local_files_only=True, device_map=REMOTE)
