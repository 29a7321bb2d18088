"""diffusers: UNets, VAEs, schedulers and whole pipelines give the local images, with generators of either device."""

from __future__ import annotations

import copy

import pytest
import torch
from diffusion_models import stable_diffusion
from torch.nn import functional

REMOTE = "remote_accelerator:0"
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning:diffusers.*"),
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def _embedded_device(embedded):
    assert embedded == REMOTE


def seeded_generator(device="cpu"):
    return torch.Generator(device=device).manual_seed(0)


def unet():
    from diffusers import UNet2DModel

    torch.manual_seed(0)
    blocks = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}
    sizes = {"block_out_channels": (8, 16), "norm_num_groups": 4, "attention_head_dim": 4, "layers_per_block": 1}
    return UNet2DModel(sample_size=8, in_channels=3, out_channels=3, **blocks, **sizes).eval()


def images(pipeline, device="cpu"):
    size = {"height": 16, "width": 16, "num_inference_steps": 2}
    return torch.tensor(pipeline("a cat", generator=seeded_generator(device), output_type="np", **size).images)


def new_pipeline():
    """Return a new pipeline with copied components."""
    shared = stable_diffusion()
    parts = {name: copy.deepcopy(part) for name, part in shared.components.items()}
    made = type(shared)(**parts, requires_safety_checker=False)
    made.set_progress_bar_config(disable=True)
    return made


@pytest.mark.parametrize("generator", [pytest.param("cpu", marks=pytest.mark.long), REMOTE])
def test_pipeline_accepts_generator_of_either_device(generator):
    expected = images(new_pipeline())
    pipeline = new_pipeline().to(REMOTE)
    pipeline.enable_attention_slicing()
    pipeline.vae.enable_slicing()
    assert pipeline.device == torch.device(REMOTE)
    torch.testing.assert_close(images(pipeline, generator), expected, rtol=1e-3, atol=1e-3)


def test_pipeline_with_cpu_offload_equals_local():
    expected, pipeline = images(new_pipeline()), new_pipeline()
    pipeline.enable_model_cpu_offload()
    assert pipeline._execution_device == torch.device(REMOTE)
    torch.testing.assert_close(images(pipeline), expected, rtol=1e-3, atol=1e-3)
    pipeline.maybe_free_model_hooks()
    assert pipeline.unet.device == torch.device("cpu")


@pytest.mark.long  # plugins/integrations loads pipelines, and saves them
def test_saved_pipeline_loads(tmp_path):
    from diffusers import StableDiffusionPipeline

    pipeline = new_pipeline().to(REMOTE)
    pipeline.save_pretrained(tmp_path)
    loaded = StableDiffusionPipeline.from_pretrained(tmp_path, device_map="balanced")
    loaded.set_progress_bar_config(disable=True)
    assert loaded.unet.device == torch.device(REMOTE)
    torch.testing.assert_close(images(loaded), images(pipeline))


@pytest.mark.parametrize("name", ["DDPMScheduler", "DDIMScheduler", "DPMSolverMultistepScheduler"])
def test_schedulers_equal_local(name):
    import diffusers

    found = []
    for device in ("cpu", REMOTE):
        scheduler = getattr(diffusers, name)()
        scheduler.set_timesteps(3, device=device)
        noise, model = torch.randn(1, 3, 8, 8, generator=seeded_generator()).to(device), unet().to(device)
        with torch.no_grad():
            for step in scheduler.timesteps:
                noise = scheduler.step(model(noise, step).sample, step, noise, generator=seeded_generator()).prev_sample
        found.append(noise.cpu())
    torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-3)


def test_training_with_ema_weights_equals_local():
    from diffusers import DDPMScheduler
    from diffusers.training_utils import EMAModel

    found = []
    for device in ("cpu", REMOTE):
        model, scheduler = unet().train().to(device), DDPMScheduler(100)
        optimizer, average = torch.optim.AdamW(model.parameters(), lr=1e-3), EMAModel(model.parameters())
        clean, noise = (torch.randn(2, 3, 8, 8, generator=seeded_generator()).to(device) * scale for scale in (1, 0.5))
        for step in (10, 50):
            steps = torch.tensor([step, step + 1], device=device)
            loss = functional.mse_loss(model(scheduler.add_noise(clean, noise, steps), steps).sample, noise)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            average.step(model.parameters())
        found.append([loss.detach().cpu(), *(p.cpu() for p in average.shadow_params)])
    torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-4)
