"""Compressed uploads are what they were, and no more memory than what was announced, whatever comes."""

from __future__ import annotations

import tracemalloc

import pytest
import torch
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from djinn_client.runtime.sending.uploads import SAMPLE, SEEN, SMALLEST, UploadCompressor
from djinn_core.errors import ProtocolError
from djinn_core.wire.compression import LARGEST, PLANES_ZSTD, compressed, expanded

SIZE = 1 << 20


@given(st.sampled_from([1, 2, 4, 8, 16]), st.binary(max_size=300))
def test_compression_round_trips(item, data):
    data = data[: len(data) // item * item]
    assert bytes(expanded(compressed(data, item), PLANES_ZSTD, item, len(data))) == data


def weights(dtype):
    return memoryview(torch.randn(SIZE, generator=torch.Generator().manual_seed(0)).to(dtype).view(torch.uint8).numpy())


@pytest.mark.parametrize(("dtype", "item", "at_most"), [(torch.bfloat16, 2, 0.75), (torch.float32, 4, 0.9)])
def test_weights_compress_well(dtype, item, at_most):
    data = weights(dtype)
    coded = compressed(data, item)
    assert len(coded) < at_most * len(data)
    assert expanded(coded, PLANES_ZSTD, item, len(data)) == data


GOOD = compressed(bytes(SIZE), 4)


@pytest.mark.parametrize(
    ("data", "item", "length"),
    [
        (GOOD, 4, SIZE + 4),
        (GOOD, 4, SIZE - 4),
        (GOOD, 4, 0),
        (GOOD, 4, SIZE - 1),
        (GOOD, 4, LARGEST + 4),
        (GOOD, 4, 1 << 60),
        (GOOD[:-3], 4, SIZE),
        (GOOD[: len(GOOD) // 2], 4, SIZE),
        (b"", 4, SIZE),
        (b"no such thing", 1, 13),
        (b"\x00" * 100, 1, 100),
        (GOOD + GOOD, 4, SIZE),
        (compressed(bytes(64 * SIZE), 1), 1, SIZE),
    ],
)
def test_damaged_data_is_refused_with_bounded_memory(data, item, length):
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError):
            expanded(data, PLANES_ZSTD, item, length)
        assert tracemalloc.get_traced_memory()[1] < 2 * SIZE
    finally:
        tracemalloc.stop()


def test_large_compression_window_is_refused():
    window = zstandard.ZstdCompressionParameters.from_level(1, window_log=30)
    coder = zstandard.ZstdCompressor(compression_params=window).compressobj()
    with pytest.raises(ProtocolError):
        expanded(coder.compress(bytes(SIZE)) + coder.flush(), PLANES_ZSTD, 1, SIZE)


def test_unknown_compression_is_refused():
    with pytest.raises(ProtocolError, match="cannot read"):
        expanded(GOOD, "lzma", 4, SIZE)


def compresses(theirs=(PLANES_ZSTD,), nbytes=SEEN, rate=1e7):
    deciding = UploadCompressor(theirs)
    deciding.note_sent(nbytes, nbytes / rate, compressed=False)
    return deciding


def test_compression_is_used_on_slow_link():
    data = weights(torch.bfloat16)
    assert compresses().compress(data, 2) is not None
    assert compresses(rate=5e9).compress(data, 2) is None, "this machine"
    assert compresses(nbytes=SEEN - 1).compress(data, 2) is None, "nothing is known of the link yet"
    assert compresses(theirs=()).compress(data, 2) is None, "the other end cannot read it"
    assert compresses().compress(data[: SMALLEST - 2], 2) is None
    noise = memoryview(torch.randint(0, 256, (2 * SAMPLE + SMALLEST,), dtype=torch.uint8).numpy())
    assert compresses().compress(noise, 1) is None, "nothing repeats in it"


def test_recent_link_rate_outweighs_older():
    deciding = compresses(rate=5e9)
    for _ in range(10):
        deciding.note_sent(SEEN, SEEN / 1e7, compressed=False)
    assert deciding.compress(weights(torch.bfloat16), 2) is not None


def test_compressed_uploads_do_not_update_rate():
    deciding, data = compresses(), weights(torch.bfloat16)
    for _ in range(10):
        deciding.note_sent(SEEN, 0.0, compressed=True)
    assert deciding.compress(data, 2) is not None
    for _ in range(10):
        deciding.note_sent(SEEN, 0.0, compressed=True)
    assert deciding.compress(data, 2) is None, "some is sent as it is, to see the link again"
    deciding.note_sent(SMALLEST, SMALLEST / 1e7, compressed=False)
    assert deciding.compress(data, 2) is not None
