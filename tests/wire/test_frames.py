import gc
import itertools
import os
import struct
import tracemalloc
import weakref

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from long_forms import long_or

from djinn_core.errors import ProtocolError
from djinn_core.wire.frames import Frame, FrameDecoder, Limits, encode_frame

LIMITS = Limits()
SOME = os.urandom(70_000)
# Lengths only, so that examples stay small: of the head, then of each buffer.
lengths = st.integers(0, 300) | st.sampled_from([0, 16_383, 16_384, 70_000])
outlines = st.lists(st.lists(lengths, min_size=1, max_size=5), min_size=1, max_size=4)


def frames_of(outline):
    return [Frame(SOME[:head], [SOME[-length:] if length else b"" for length in body]) for head, *body in outline]


def wire_bytes(*sent):
    return b"".join(bytes(part) for frame in sent for part in encode_frame(frame, LIMITS))


def plain(frame):
    return frame.head, [bytes(buffer) for buffer in frame.body]


def decode_in_pieces(data, sizes, limits=LIMITS):
    decoder = FrameDecoder(limits)
    position = 0
    while position < len(data):
        place = decoder.buffer()
        count = min(next(sizes), len(place), len(data) - position)
        place[:count] = data[position : position + count]
        decoder.received(count)
        position += count
    return decoder


@given(outlines, st.lists(st.integers(1, 300) | st.integers(1, 300_000), min_size=1, max_size=8))
def test_frames_decode_from_any_split(outline, sizes):
    sent = frames_of(outline)
    stream = wire_bytes(*sent)
    sizes = [max(size, len(stream) // 2000) for size in sizes]
    decoder = decode_in_pieces(stream, itertools.cycle(sizes))
    assert [plain(frame) for frame in decoder.frames] == [plain(frame) for frame in sent]
    assert not decoder.mid_frame


def test_frames_decode_from_single_bytes():
    sent = frames_of([[3, 0, 5], [0], [1], [0, 0], [7, 1, 0, 0, 2]])
    decoder = decode_in_pieces(wire_bytes(*sent), itertools.repeat(1))
    assert [plain(frame) for frame in decoder.frames] == [plain(frame) for frame in sent]


@settings(max_examples=long_or(100, 300))
@given(outlines, st.data())
def test_mutated_stream_decodes_or_raises(outline, data):
    stream = bytearray(wire_bytes(*frames_of(outline)))
    for _ in range(data.draw(st.integers(1, 4))):
        # The beginning, where the numbers are, is hit as often as all the rest.
        position = data.draw(st.integers(0, min(60, len(stream) - 1)) | st.integers(0, len(stream) - 1))
        stream[position] = data.draw(st.integers(0, 255))
    decoder = FrameDecoder(Limits(head=1 << 20, body=1 << 22, buffers=1000))
    try:
        decoder.feed(stream)
    except ProtocolError:
        with pytest.raises(ProtocolError):
            decoder.feed(b"more")
    for frame in decoder.frames:
        assert isinstance(frame.head, bytes)


@given(st.binary(max_size=4000))
def test_random_bytes_are_refused(noise):
    decoder = FrameDecoder(LIMITS)
    if len(noise) < 24:
        decoder.feed(noise)
        assert not decoder.frames
    else:
        with pytest.raises(ProtocolError, match="not a frame"):
            decoder.feed(noise)


@pytest.mark.parametrize(
    ("head", "buffers", "body"),
    [(1 << 31, 0, 0), (10, 1 << 30, 0), (10, 1, 1 << 40), (10, 2, (1 << 64) - 1)],
)
def test_frame_over_limits_allocates_nothing(head, buffers, body):
    decoder = FrameDecoder(LIMITS)
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError, match="exceeds the limits"):
            decoder.feed(struct.pack("<4sHHIIQ", b"DJNF", 1, 0, head, buffers, body))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def resident_bytes():
    return psutil.Process().memory_info().rss


def test_large_frame_memory_grows_with_received_bytes():
    size = 8 << 30
    decoder = FrameDecoder(Limits(body=size))
    before = resident_bytes()
    decoder.feed(struct.pack("<4sHHIIQ", b"DJNF", 1, 0, 0, 1, size) + struct.pack("<Q", size) + bytes(100))
    assert decoder.mid_frame
    assert resident_bytes() - before < 64 << 20


def test_memory_error_becomes_protocol_error():
    def refuse(length):
        raise MemoryError

    decoder = FrameDecoder(LIMITS, allocate=refuse)
    with pytest.raises(ProtocolError, match="no memory for a buffer of 100,000 bytes"):
        decoder.feed(wire_bytes(Frame(b"head", [bytes(100_000)])))


@pytest.mark.parametrize(
    ("prefix", "message"),
    [
        (struct.pack("<4sHHIIQ", b"HTTP", 1, 0, 0, 0, 0), "not a frame"),
        (struct.pack("<4sHHIIQ", b"DJNF", 2, 0, 0, 0, 0), "version 2"),
        (struct.pack("<4sHHIIQ", b"DJNF", 1, 7, 0, 0, 0), "kind 7"),
        (struct.pack("<4sHHIIQ", b"DJNF", 1, 0, 0, 0, 5), "has no buffers"),
        (struct.pack("<4sHHIIQQQ", b"DJNF", 1, 0, 0, 2, 5, 2, 2), "buffers of 4 bytes, but its header announces 5"),
    ],
)
def test_inconsistent_prefix_is_refused(prefix, message):
    with pytest.raises(ProtocolError, match=message):
        FrameDecoder(LIMITS).feed(prefix)


def test_bodies_are_sent_without_copy():
    body = bytearray(b"x" * 3000)
    parts = encode_frame(Frame(b"head", [body, b"", memoryview(body)[10:20]]), LIMITS)
    body[:] = b"y" * 3000
    assert [bytes(part) for part in parts[1:]] == [b"y" * 3000, b"y" * 10]


def test_large_bodies_get_own_aligned_memory():
    decoder = FrameDecoder(LIMITS)
    opening, _ = encode_frame(Frame(b"h", [bytes(100_000)]), LIMITS)
    decoder.feed(opening)
    place = decoder.buffer()
    assert len(place) == 100_000
    place[:] = b"z" * 100_000
    decoder.received(100_000)
    (received,) = decoder.frames.popleft().body
    assert received.obj is place.obj
    address = received.obj.__array_interface__["data"][0]
    assert address % 64 == 0


@pytest.mark.parametrize("frame", [Frame(b"x" * 11), Frame(b"", [b"x" * 21]), Frame(b"", [b""] * 4)])
def test_encoder_enforces_limits(frame):
    with pytest.raises(ProtocolError, match="exceeds the limits"):
        encode_frame(frame, Limits(head=10, body=20, buffers=3))


def test_non_contiguous_buffer_is_refused():
    with pytest.raises(ProtocolError, match="not contiguous"):
        encode_frame(Frame(b"", [memoryview(bytes(10))[::2]]), LIMITS)


def test_frame_owns_its_memory():
    import gc
    import weakref

    decoder = FrameDecoder(LIMITS)
    decoder.feed(wire_bytes(Frame(b"h", [bytes(100_000)])))
    memory = weakref.ref(decoder.frames.popleft().body[0].obj)
    gc.collect()
    assert memory() is None


def test_decoder_is_freed_with_owner():
    decoder = FrameDecoder(Limits())
    decoder.feed(b"".join(bytes(part) for part in encode_frame(Frame(b"head", [bytes(1 << 17)]), Limits()))[:-1])
    alive = weakref.ref(decoder)
    gc.disable()
    try:
        del decoder
        assert alive() is None, "its memory waits for the garbage collector"
    finally:
        gc.enable()
