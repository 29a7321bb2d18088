import warnings

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from djinn_core.errors import ProtocolError
from djinn_core.wire.frames import Frame, FrameDecoder, Limits, allocate, encode_frame
from djinn_core.wire.messages import TensorHeader
from djinn_core.wire.tensors import dtype_from_name, dtype_name, tensor_from_wire, tensor_to_wire

DTYPES = [
    value
    for value in dict.fromkeys(v for v in vars(torch).values() if isinstance(v, torch.dtype))
    if not str(value).startswith(("torch.q", "torch.quint"))
]


def send_and_receive(tensor):
    header, data = tensor_to_wire(tensor)
    decoder = FrameDecoder(Limits())
    for part in encode_frame(Frame(msgspec.msgpack.encode(header), [data]), Limits()):
        decoder.feed(part)
    frame = decoder.frames.popleft()
    return tensor_from_wire(msgspec.msgpack.decode(frame.head, type=TensorHeader), frame.body[0])


def bytes_of(tensor):
    start = tensor.storage_offset() * tensor.element_size()
    return bytes(tensor.untyped_storage())[start : start + tensor.numel() * tensor.element_size()]


@pytest.mark.filterwarnings("ignore:(ComplexHalf|BComplex32) support is experimental")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_arrives_bit_for_bit(dtype):
    bits = torch.randint(0, 256, (4 * 3 * dtype.itemsize,), dtype=torch.uint8)
    if dtype is torch.bool:
        bits = bits % 2
    tensor = torch.empty(0, dtype=dtype).set_(bits.untyped_storage(), 0, (4, 3), (3, 1))
    copy = send_and_receive(tensor)
    assert (copy.dtype, copy.shape, copy.stride()) == (dtype, tensor.shape, tensor.stride())
    assert bytes_of(copy) == bytes(bits.numpy())
    assert dtype_from_name(dtype_name(dtype)) is dtype


def test_unknown_dtype_names_are_refused():
    for name in ("nn", "load", "float", "storage", "qint8", "", "float32 "):
        with pytest.raises(ProtocolError, match="has no dtype"):
            dtype_from_name(name)


FILLED = {
    "row-major": torch.randn(4, 5),
    "0-dim": torch.tensor(3.0),
    "one element": torch.randn(1, 1, 1),
    "transposed": torch.randn(4, 5).t(),
    "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "permuted": torch.randn(2, 3, 4).permute(2, 0, 1),
    "rows of a larger one": torch.randn(10, 4)[2:5],
    "requires grad": torch.randn(3, 3, requires_grad=True),
    "parameter": torch.nn.Parameter(torch.randn(3)),
    "expanded": torch.randn(4, 1).expand(4, 1000),
    "size 1 with odd stride": torch.randn(4, 6).as_strided((1, 3), (77, 1)),
    "more dimensions than NumPy's arrays": torch.randn([1] * 99 + [2]),
}


@pytest.mark.parametrize("name", FILLED)
def test_dense_tensor_is_sent_without_copy(name):
    tensor = FILLED[name]
    header, data = tensor_to_wire(tensor)
    same_place = tensor_from_wire(header, data)
    assert same_place.data_ptr() == tensor.data_ptr()
    copy = send_and_receive(tensor)
    assert torch.equal(copy, tensor.detach())
    assert copy.stride() == tensor.stride()
    assert not copy.requires_grad


def test_expanded_dimensions_are_sent_once():
    assert tensor_to_wire(torch.randn(4, 1).expand(4, 1000))[1].nbytes == 16


COPIED = {
    "columns": torch.randn(6, 6)[:, 1:4],
    "every other": torch.randn(10)[::2],
    "overlapping": torch.randn(10).unfold(0, 3, 1),
    "conj": torch.randn(4, dtype=torch.complex64).conj(),
    "neg": torch.randn(4, dtype=torch.complex64).conj().imag,
}


@pytest.mark.parametrize("name", COPIED)
def test_strided_or_lazy_tensor_is_sent_row_major(name):
    tensor = COPIED[name]
    copy = send_and_receive(tensor)
    assert torch.equal(copy, tensor)
    assert copy.is_contiguous()
    assert not copy.is_conj()
    assert not copy.is_neg()


@pytest.mark.parametrize("shape", [(0,), (3, 0, 2), (0, 5)])
def test_empty_tensors_keep_their_shape(shape):
    copy = send_and_receive(torch.empty(shape, dtype=torch.bfloat16))
    assert copy.shape == shape
    assert copy.dtype is torch.bfloat16


@pytest.mark.parametrize(
    "tensor",
    [torch.eye(3).to_sparse(), torch.empty(3, device="meta"), torch.eye(3).to_mkldnn()],
    ids=["sparse", "meta", "mkldnn"],
)
def test_non_strided_tensor_is_refused(tensor):
    with pytest.raises(ProtocolError, match="only strided CPU tensors"):
        tensor_to_wire(tensor)


sizes = st.lists(st.integers(-1, 2**70) | st.integers(0, 5), max_size=4).map(tuple)


@given(st.sampled_from(["float32", "bfloat16", "bool", "qint8", "no"]), sizes, sizes, st.binary(max_size=64))
def test_mismatched_header_raises_protocol_error(dtype, shape, stride, data):
    try:
        tensor = tensor_from_wire(TensorHeader(dtype, shape, stride), bytearray(data))
    except ProtocolError:
        return
    assert tensor.untyped_storage().nbytes() == len(data)


def test_wrong_byte_count_is_refused():
    header, data = tensor_to_wire(torch.randn(8))
    for wrong in (data[:-1], bytes(data) + b"x"):
        with pytest.raises(ProtocolError, match="takes 32 bytes, but"):
            tensor_from_wire(header, wrong)


def test_read_only_and_odd_buffers_are_copied():
    header, data = tensor_to_wire(torch.arange(8.0))
    shifted = bytearray(b"x" + bytes(data))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for buffer in (bytes(data), memoryview(shifted)[1:]):
            tensor = tensor_from_wire(header, buffer)
            assert torch.equal(tensor, torch.arange(8.0))
            assert tensor.data_ptr() % 4 == 0
            tensor.add_(1)
    assert bytes(shifted[1:]) == bytes(data)


def test_tensor_outlives_its_frame():
    tensors = [send_and_receive(torch.full((1000,), float(n))) for n in range(50)]
    assert all(bool((tensor == n).all()) for n, tensor in enumerate(tensors))


def test_kernel_bits_on_received_memory():
    for size in (7, 64, 257):
        a, b = torch.randn(size, size), torch.randn(size, size)
        ra, rb = send_and_receive(a), send_and_receive(b)
        for op in (torch.matmul, torch.add, lambda x, y: torch.softmax(x, -1) * y, lambda x, y: x.sum() + y.cumsum(0)):
            assert torch.equal(op(a, b), op(ra, rb))


def test_received_memory_has_pytorch_alignment():
    for length in (1, 100, 5000, 1 << 20):
        assert torch.frombuffer(allocate(length), dtype=torch.uint8).data_ptr() % 64 == 0
