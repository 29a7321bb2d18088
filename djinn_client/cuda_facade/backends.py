"""`torch.backends` and `torch.version`: what a build of PyTorch for CUDA says of itself.

Switches such as `torch.backends.cudnn.benchmark` are PyTorch's own everywhere; they concern kernels, and have no effect here.
"""

from __future__ import annotations

import torch
import torch.backends.cuda
import torch.backends.cudnn
import torch.utils.flop_counter  # which warns that there is no Triton where PyTorch says it has CUDA: before it does

from djinn_client.cuda_facade.module import no, yes

# For programs that take the version apart; nothing here depends on it, and the executor's own is not known.
STAND_IN_VERSION = "12.8"


def replace() -> None:
    """PyTorch is built for CUDA, and no tensor of this process is for cuDNN."""
    torch.backends.cuda.is_built = yes
    torch.backends.cudnn.is_acceptable = no
    torch.version.cuda = torch.version.cuda or STAND_IN_VERSION
