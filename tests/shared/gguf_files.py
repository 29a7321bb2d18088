"""Files in the format GGUF, written as its description says."""

from __future__ import annotations

import struct
from collections.abc import Mapping

import numpy as np
import torch

TYPES = {
    torch.float32: 0,
    torch.float16: 1,
    torch.int8: 24,
    torch.int16: 25,
    torch.int32: 26,
    torch.int64: 27,
    torch.float64: 28,
    torch.bfloat16: 30,
}
Q4_K, Q8_0 = 12, 8


def text(value: str | bytes) -> bytes:
    """Return a GGUF text: its length and its bytes."""
    data = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(data)) + data


def key_value(name: str, kind: int, value: bytes) -> bytes:
    """Return a GGUF key with its value."""
    return text(name) + struct.pack("<I", kind) + value


def quantized(tensor: torch.Tensor) -> tuple[bytes, torch.Tensor]:
    """Return the Q8_0 blocks of a tensor, and the numbers that they encode."""
    blocks = tensor.reshape(-1, 32)
    scales = (blocks.abs().amax(1, keepdim=True) / 127).half()
    whole = (blocks / scales.float().clamp_min(1e-30)).round().clamp(-127, 127).to(torch.int8)
    stored = np.concatenate([scales.numpy().view(np.uint8), whole.numpy().view(np.uint8)], axis=1)
    return stored.tobytes(), (scales.float() * whole.float()).view(tensor.shape)


def gguf_file(
    tensors: Mapping[str, torch.Tensor | tuple[int, tuple[int, ...], bytes]],
    keys: bytes = b"",
    count: int = 0,
    version: int = 3,
    alignment: int = 32,
) -> bytes:
    """Return a GGUF file with these tensors, or with tensors given as type, shape and bytes."""
    described, body = b"", b""
    for name, given in tensors.items():
        if isinstance(given, torch.Tensor):
            kind, shape, data = TYPES[given.dtype], tuple(given.shape), b""
            if given.numel():
                data = given.contiguous().flatten().view(torch.uint8).numpy().tobytes()
        else:
            kind, shape, data = given
        described += text(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        described += struct.pack("<IQ", kind, len(body))
        body += data + bytes(-len(data) % alignment)
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), count) + keys + described
    return head + bytes(-len(head) % alignment) + body
