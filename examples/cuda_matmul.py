"""A script written for CUDA. It does not import Djinn.

djinn run examples/cuda_matmul.py
"""

import torch

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if device.type == "cuda":
    print(f"{torch.cuda.device_count()} GPU, {torch.cuda.get_device_name(0)}")

torch.manual_seed(0)
a = torch.randn(512, 512, device=device)
b = torch.randn(512, 512).to(device, non_blocking=True)
with torch.autocast(device.type, dtype=torch.bfloat16):
    c = a @ b
print(f"{tuple(c.shape)} {c.dtype} on {c.device}, mean of the absolute values {c.abs().float().mean():.3f}")
