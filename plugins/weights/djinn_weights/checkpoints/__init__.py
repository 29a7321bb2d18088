"""Read PyTorch checkpoints on a server, without running code from them.

- `checkpoint`: the header of a `torch.save` file. `pickled`: the tensors in its pickle, which is interpreted, not run.
- `strided`: strided tensors in a file.
"""

from __future__ import annotations

from djinn.hooks import FileHeader, WeightFile, WeightFormat, hookimpl
from djinn_weights.checkpoints.checkpoint import read_pytorch

djinn_api_version = "2.0"


class Checkpoints(WeightFormat):
    """The weight format of PyTorch checkpoints."""

    name = "checkpoints"
    suffixes = (".bin", ".pt", ".pth", ".ckpt")
    whole = ("pytorch_model.bin", "diffusion_pytorch_model.bin", "adapter_model.bin")

    def read_header(self, file: WeightFile) -> FileHeader:
        """Read and check the header of a file."""
        return read_pytorch(file)


@hookimpl
def djinn_register_weight_formats() -> list[WeightFormat]:
    """Return the weight format `checkpoints`."""
    return [Checkpoints()]
