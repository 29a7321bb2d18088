"""Tensor serialisation: Djinn's against safetensors, `torch.save` and pickle, in time and copies.

    python -m evaluation.benchmarks.bench_tensors [--json] [--quick] [--small]

Encoding ends with buffers for a socket; decoding begins with bytes in memory. Djinn builds and parses a frame; received
data already has its own memory. Copies of the tensor's bytes are counted.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from functools import partial

import numpy as np
import safetensors.torch
import torch

from djinn_core.wire.frames import Frame, Limits, encode_frame
from djinn_core.wire.messages import decode, encode
from djinn_core.wire.tensors import TensorHeader, tensor_from_wire, tensor_to_wire
from djinn_core.wire.upload_messages import UploadPart
from evaluation.benchmarks.measuring import Case, Effort, Outcome, compare, main, median_of

ELEMENTS = 49_000_000  # 196 MB of float32
TIMES = 5
LIMITS = Limits()


def measure_djinn(tensor: torch.Tensor) -> torch.Tensor:
    """Encode and decode a tensor as an upload does, without a socket."""
    header, data = tensor_to_wire(tensor)
    message = UploadPart(1, header.dtype, header.shape, header.stride, data.nbytes, 0)
    opening, body = encode_frame(Frame(encode(message), [data]), LIMITS)
    came = decode(bytes(opening)[24:-8])
    return tensor_from_wire(TensorHeader(came.dtype, came.shape, came.stride), body)


def by_safetensors(tensor: torch.Tensor) -> torch.Tensor:
    return safetensors.torch.load(safetensors.torch.save({"t": tensor}))["t"]


def by_torch_save(tensor: torch.Tensor) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(tensor, file)
    return torch.load(io.BytesIO(file.getbuffer()), weights_only=True)


def by_pickle(tensor: torch.Tensor) -> torch.Tensor:
    return pickle.loads(pickle.dumps(tensor, protocol=5))


def by_pickle_out_of_band(tensor: torch.Tensor) -> torch.Tensor:
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(tensor.numpy(), protocol=5, buffer_callback=buffers.append)
    return torch.from_numpy(pickle.loads(data, buffers=buffers))


def over(reference: Callable[[torch.Tensor], torch.Tensor], effort: Effort) -> Outcome:
    """Return the time of encoding and decoding, divided by the reference."""
    tensor = torch.from_numpy(np.random.default_rng(0).random(1000 if effort.small else ELEMENTS, np.float32))
    for way in (reference, measure_djinn):
        assert torch.equal(way(tensor), tensor)
    theirs, mine = partial(reference, tensor), partial(measure_djinn, tensor)
    alone = median_of(theirs, effort.times(TIMES))
    return compare(theirs, mine, effort, TIMES, alone).outcome()


def copies(effort: Effort) -> Outcome:
    """Return 0 if a decoded tensor has the memory of the encoded one, so that no bytes were copied, otherwise 1."""
    tensor = torch.arange(1000 if effort.small else ELEMENTS, dtype=torch.float32)
    return Outcome(float(measure_djinn(tensor).data_ptr() != tensor.data_ptr()))


CASES = (
    Case("over_safetensors", 0.05, partial(over, by_safetensors)),
    Case("over_torch_save", None, partial(over, by_torch_save)),
    Case("over_pickle", None, partial(over, by_pickle)),
    Case("over_pickle_out_of_band", None, partial(over, by_pickle_out_of_band)),
    Case("copies", 0, copies, ""),
)

if __name__ == "__main__":
    main("A tensor of 196 MB to bytes and back", CASES)
