"""Malformed input is refused with a reason, quickly, and in the memory that it takes itself. `python -m evaluation fuzz` has millions more."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import torch

from djinn_core.errors import ProtocolError
from djinn_core.wire.compression import PLANES_ZSTD, compressed, expanded
from djinn_core.wire.frames import FrameDecoder, Limits
from djinn_core.wire.upload_messages import UploadPart
from djinn_server.builtins.cpu import CpuRuntime
from djinn_server.running.values import ValueTable
from djinn_server.weights.uploads import UploadAssembly
from evaluation.fuzz.decoding import GROWTH_BYTES, Trial, resident, run_at_random
from evaluation.fuzz.generating import message_types
from evaluation.fuzz.targets import TARGETS

SEEDS = sorted((Path(__file__).parent / "seeds").glob("*/*"))
TERABYTE = 1 << 40


@pytest.mark.parametrize("name", TARGETS)
def test_readers_survive_random_input(name):
    found = run_at_random(name, 600, seed=5)
    assert found["bugs"] == []
    assert found["inputs"] == 600
    assert 0 < found["refused"] < 600 or name in {"tickets", "journals"}  # these have checksums


@pytest.mark.parametrize("path", SEEDS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_regression_inputs_are_refused(path):
    target = TARGETS[path.parent.name]()
    assert Trial(target.read, target.allowed).give(path.read_bytes()) is None


def test_fuzzer_covers_every_message():
    """The list of types comes from the decoder."""
    import random

    draw = random.Random(0)
    kinds = {kind.__name__ for kind in message_types()}
    assert {"Hello", "Attach", "Submit", "UploadPart", "SendValues", "Resume"} <= kinds
    for data in TARGETS["messages"]().seeds(draw):
        TARGETS["messages"]().read(data)


def claim_in_frame():
    decoder = FrameDecoder(Limits(body=2 * TERABYTE))
    with pytest.raises(ProtocolError, match="no memory") if _allocation_fails(TERABYTE) else _NullContext():
        decoder.feed(struct.pack("<4sHHIIQQ", b"DJNF", 1, 0, 0, 1, TERABYTE, TERABYTE) + bytes(100))
    return decoder


def claim_in_upload():
    values = ValueTable()
    uploads = UploadAssembly(CpuRuntime(), values, None)
    uploads.take(UploadPart(5, "uint8", (TERABYTE,), (1,), TERABYTE), [bytearray(100)])
    return uploads, values


def claim_in_compression():
    with pytest.raises(ProtocolError, match="cannot be one buffer"):
        expanded(compressed(bytes(100), 1), PLANES_ZSTD, 1, TERABYTE)
    with pytest.raises(ProtocolError, match="more than the 100 bytes"):
        expanded(compressed(bytes(50 << 20), 1), PLANES_ZSTD, 1, 100)


def _allocation_fails(size):
    try:
        torch.empty(size, dtype=torch.uint8)
    except RuntimeError:
        return True
    return False


class _NullContext:
    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None


@pytest.mark.parametrize("claim", [claim_in_frame, claim_in_upload, claim_in_compression], ids=lambda c: c.__name__)
def test_large_claims_allocate_no_memory(claim):
    before = resident()
    kept = claim()
    assert resident() - before < GROWTH_BYTES
    del kept
