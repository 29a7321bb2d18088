"""GGUF files: every type of tensor that can be decoded, and errors for all others."""

from __future__ import annotations

import importlib.util
import struct
import time

import pytest
import torch
from gguf_files import Q4_K, Q8_0, gguf_file, key_value, quantized, text
from hypothesis import given
from hypothesis import strategies as st
from memory_file import MemoryFile, contents

from djinn.testing import PluginConformance, WeightFormatConformance
from djinn_weights.gguf import Gguf
from djinn_weights.gguf import header as gguf
from djinn_weights.gguf import quantized as formats_quantized
from djinn_weights.gguf.header import read_gguf

torch.manual_seed(0)
TENSORS = {
    "token_embd.weight": torch.randn(5, 64),
    "half": torch.randn(2, 3, 4).half(),
    "brain": torch.randn(7).bfloat16(),
    "double": torch.randn(3, dtype=torch.float64),
    "empty": torch.empty(0, 4),
    **{
        str(dtype): torch.arange(6, dtype=dtype).view(2, 3)
        for dtype in (torch.int8, torch.int16, torch.int32, torch.int64)
    },
}
BLOCKS, NUMBERS = quantized(torch.randn(12, 3, 64))
KEYS = b"".join(
    [
        key_value("general.architecture", 8, text("llama")),
        key_value("llama.block_count", 4, struct.pack("<I", 22)),
        key_value("llama.rope.freq_base", 6, struct.pack("<f", 0.5)),
        key_value("tokenizer.add_bos", 7, b"\1"),
        key_value("tokenizer.tokens", 9, struct.pack("<IQ", 8, 3) + text("a") + text("") + text("ccc")),
        key_value("tokenizer.scores", 9, struct.pack("<IQ3f", 6, 3, 1, 2, 3)),
        key_value("lists", 9, struct.pack("<IQ", 9, 2) + 2 * struct.pack("<IQ2H", 2, 2, 1, 1)),
        key_value("general.name", 8, text(b"\xff name")),
    ]
)  # fmt: skip
STORED = TENSORS | {"quantized": (Q8_0, (12, 3, 64), BLOCKS), "k": (Q4_K, (2, 256), bytes(288))}


@pytest.mark.parametrize(("version", "alignment"), [(2, 32), (3, 32), (3, 128), (3, 8)])
def test_every_tensor_type_is_read(version, alignment, monkeypatch):
    monkeypatch.setattr(formats_quantized, "_BLOCKS", 7)
    keys = KEYS + key_value("general.alignment", 4, struct.pack("<I", alignment))
    file = MemoryFile(gguf_file(STORED, keys, 9, version, alignment))
    header = read_gguf(file)
    assert list(header.tensors) == list(STORED)
    for name, tensor in (TENSORS | {"quantized": NUMBERS}).items():
        entry = header.tensors[name]
        assert (entry.dtype, entry.shape, entry.size) == (tensor.dtype, tuple(tensor.shape), tensor.nbytes)
        whole = tensor.flatten().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
        assert contents(file, entry) == whole, name
        for first in range(0, len(whole), 1 + len(whole) // 9):
            for size in (1, 5, 128, len(whole) // 3):
                size = min(size, len(whole) - first)  # noqa: PLW2901
                assert contents(file, entry, first, size) == whole[first : first + size], name
    other = header.tensors["k"]
    assert (other.dtype, other.shape, other.stored_as) == (None, (2, 256), "Q4_K")
    assert header.metadata == {
        "general.architecture": "llama",
        "llama.block_count": "22",
        "llama.rope.freq_base": "0.5",
        "tokenizer.add_bos": "True",
        "general.name": "\ufffd name",
        "general.alignment": str(alignment),
    }


@pytest.mark.skipif(importlib.util.find_spec("gguf") is None, reason="needs the package gguf")
def test_dequantization_equals_reference(tmp_path):
    import numpy as np
    from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, dequantize, quantize

    weights = np.random.default_rng(0).standard_normal((40, 96), np.float32) * 300
    writer = GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tensor("q", quantize(weights, GGMLQuantizationType.Q8_0), raw_dtype=GGMLQuantizationType.Q8_0)
    writer.add_tensor("w", weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = MemoryFile((tmp_path / "model.gguf").read_bytes())
    header = read_gguf(file)
    assert header.metadata["general.architecture"] == "llama"
    for tensor in GGUFReader(tmp_path / "model.gguf").tensors:
        expected = dequantize(tensor.data, tensor.tensor_type)
        assert header.tensors[tensor.name].shape == expected.shape
        assert contents(file, header.tensors[tensor.name]) == expected.tobytes()
    ours = MemoryFile(gguf_file(TENSORS | {"quantized": (Q8_0, (12, 3, 64), BLOCKS)}, KEYS, 8))
    (tmp_path / "ours.gguf").write_bytes(ours.data)
    for tensor in GGUFReader(tmp_path / "ours.gguf").tensors:
        entry = read_gguf(ours).tensors[tensor.name]
        assert tuple(reversed(tensor.shape.tolist())) == entry.shape
        assert tensor.data_offset == (entry.decoding.start if entry.decoding else entry.start)


HEAD = b"GGUF" + struct.pack("<I", 3)
ONE = {"a": torch.ones(4)}


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"", "ends within"),
        (b"GGML" + bytes(100), "is not a GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "another byte order"),
        (HEAD + struct.pack("<QQ", 1 << 63, 0), "too many tensors"),
        (HEAD + struct.pack("<QQ", 0, 1 << 63), "more than"),
        (HEAD + struct.pack("<QQ", 0, 1000), "ends within"),
        (HEAD + struct.pack("<QQQ", 0, 1, 1 << 63), "ends within"),
        (gguf_file(ONE, key_value("a", 13, b""), 1), "unknown type"),
        (gguf_file(ONE, key_value("a", 9, struct.pack("<IQ", 4, 1 << 62)), 1), "ends within"),
        (gguf_file(ONE, key_value("a", 9, struct.pack("<IQ", 8, 1 << 62)), 1), "more than"),
        (gguf_file(ONE, key_value("a", 9, struct.pack("<IQ", 9, 1) * 9), 1), "unknown type"),
        (gguf_file(ONE, key_value("general.alignment", 4, bytes(4)), 1), "alignment"),
        (gguf_file(ONE, key_value("general.alignment", 8, text("x")), 1), "alignment"),
        (gguf_file({"a": (0, (9,), bytes(16))}), "outside of the file"),
        (gguf_file({"a": (0, (1 << 62, 1 << 62), bytes(16))}), "outside of the file"),
        (gguf_file({"a": (0, (0, 1 << 63), bytes(16))}), "outside of the file"),
        (gguf_file({"a": (0, (1,) * 129, bytes(16))}), "129 dimensions"),
        (gguf_file({"a": (Q8_0, (16,), bytes(34))}), "unknown type"),
        (gguf_file({"a": (Q8_0, (64,), bytes(34))}), "outside of the file"),
        (gguf_file({"a": (99, (16,), bytes(34))}), "unknown type"),
        (gguf_file({"a": (0, (16,), b""), "b": (0, (4,), bytes(64))}), "overlaps"),
        (gguf_file(ONE)[:-20], "outside of the file"),
    ],
)  # fmt: skip
def test_malformed_gguf_files_are_refused(data, match):
    with pytest.raises(ValueError, match=match):
        read_gguf(MemoryFile(data))


def test_invalid_or_repeated_tensor_names_are_refused():
    whole = gguf_file({"aa": torch.ones(4), "bb": torch.ones(4)})
    with pytest.raises(ValueError, match="UTF-8"):
        read_gguf(MemoryFile(whole.replace(b"bb", b"\xff\xff")))
    with pytest.raises(ValueError, match="twice"):
        read_gguf(MemoryFile(whole.replace(b"bb", b"aa")))


def test_large_vocabulary_needs_few_reads():
    words = 200_000
    tokens = struct.pack("<IQ", 8, words) + b"".join(text(f"token{number}") for number in range(words))
    file = MemoryFile(gguf_file(ONE, key_value("tokenizer.tokens", 9, tokens), 1))
    started = time.monotonic()
    assert contents(file, read_gguf(file).tensors["a"]) == torch.ones(4).numpy().tobytes()
    assert time.monotonic() - started < 5
    assert len(file.reads) < 15


def test_gguf_over_limits_is_refused(monkeypatch):
    monkeypatch.setattr(gguf, "HEADER_LIMIT", 200)
    with pytest.raises(ValueError, match="too long"):
        read_gguf(MemoryFile(gguf_file(ONE, key_value("a", 8, text("x" * 300)), 1)))


SAMPLE = gguf_file(STORED, KEYS, 8)


@given(st.data())
def test_mutated_gguf_files_are_read_or_refused(data):
    whole = bytearray(SAMPLE)
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, 1200))] = data.draw(st.sampled_from([0, 1, 2, 9, 32, 127, 128, 255]))
    file = MemoryFile(bytes(whole[: data.draw(st.one_of(st.just(len(whole)), st.integers(0, len(whole))))]))
    try:
        header = read_gguf(file)
    except ValueError:
        return
    for entry in header.tensors.values():
        assert entry.size <= 4 * file.size
        if entry.size:
            contents(file, entry, 0, 1), contents(file, entry, entry.size - 1)


class TestFormat(WeightFormatConformance):
    @pytest.fixture
    def form(self):
        return Gguf()

    @pytest.fixture
    def make_file(self):
        return gguf_file


class TestPlugin(PluginConformance):
    @pytest.fixture
    def plugin(self):
        import djinn_weights.gguf

        return djinn_weights.gguf
