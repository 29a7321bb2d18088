"""Sample an image in 50 DDIM steps with a small U-Net of diffusers. Only the image is read."""

from __future__ import annotations

import torch
from diffusers import DDIMScheduler, UNet2DModel

from evaluation.rivals.counting import Device, Phase

STEPS, CHANNELS = 50, (32, 64)
CALLS = ("first call", "second call")


def run(device: Device, phase: Phase, pixels: int) -> None:
    """Sample an image of `pixels` by `pixels`. The noise is made on the device."""
    blocks = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}
    sizes = {"block_out_channels": CHANNELS, "layers_per_block": 1, "norm_num_groups": 8}
    model = UNet2DModel(sample_size=pixels, **sizes, **blocks).eval().to(device)
    scheduler = DDIMScheduler()
    for call in CALLS:
        with phase(call), torch.no_grad():
            sample(model, scheduler, device, pixels).cpu()


def sample(model: UNet2DModel, scheduler: DDIMScheduler, device: Device, pixels: int) -> torch.Tensor:
    """Return an image on the device."""
    scheduler.set_timesteps(STEPS)
    image = torch.randn(1, 3, pixels, pixels, device=device)
    for moment in scheduler.timesteps:
        noise = model(image, moment).sample
        image = scheduler.step(noise, moment, image).prev_sample
    return image
