"""Fuzz targets: decoders of untrusted bytes. A target takes any bytes, and may raise only its declared exceptions."""

from __future__ import annotations

import contextlib
import io
import os
import random
import shutil
import struct
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import msgspec
import torch
from gguf_files import Q8_0, gguf_file, key_value, text
from memory_file import MemoryFile
from safetensors.torch import save

from djinn_core.errors import (
    ConfigurationError,
    DjinnError,
    ProtocolError,
    SessionLost,
    StartupError,
    UnsupportedOperation,
    WeightsUnavailable,
)
from djinn_core.ir.form import Form, Operand
from djinn_core.protocol.connection_file import ConnectionFile, read_connection_file
from djinn_core.wire import binding_delta, compression, messages
from djinn_core.wire.frame_order import Inbox, Outbox, split
from djinn_core.wire.frames import Frame, FrameDecoder, Limits, encode_frame
from djinn_core.wire.peer_messages import Item, TransferHeader, View
from djinn_core.wire.tensors import tensor_from_wire
from djinn_core.wire.upload_messages import BlobOffer, BlobQuery, UploadPart
from djinn_server.builtins.cpu import CpuRuntime
from djinn_server.builtins.safetensors_files import Safetensors
from djinn_server.builtins.weights import FileSource
from djinn_server.disk_quota import DiskQuota
from djinn_server.hookspecs.weight_sources import WeightPermissions, WeightSource
from djinn_server.launch import orders, tickets
from djinn_server.launch.token_table import TokenTable, create, parse_table
from djinn_server.peers.packed_values import allocate_item
from djinn_server.recovery.journal import Journal
from djinn_server.recovery.journal_reader import JournalReader
from djinn_server.recovery.log_records import SessionIdentity, SnapshotHeader
from djinn_server.recovery.snapshot_format import (
    KnownTemplate,
    Snapshot,
    decode_snapshot,
    encode_snapshot,
    put_values,
)
from djinn_server.running.device_time import DeviceTimer
from djinn_server.running.own_operators import own_operators
from djinn_server.running.random_state import DeviceRandomness, state_to_bytes
from djinn_server.running.template_compiler import compile_template
from djinn_server.running.values import ValueTable
from djinn_server.weights.uploads import UploadAssembly
from djinn_server.weights.weight_reader import WeightReader
from djinn_weights.checkpoints import Checkpoints
from djinn_weights.gguf import Gguf
from evaluation.fuzz.generating import generated, message_types

RELU = Form("aten::relu", (Operand(),), (), ("new",), False)
TEMPLATE = messages.Template((RELU,), (0,), (0, 1), (0,), (1,))
RUNTIME = CpuRuntime()
OWN = own_operators(RUNTIME, DeviceTimer(RUNTIME), DeviceRandomness(RUNTIME.device))
KEY = bytes(32)
_DECODERS: dict[Any, msgspec.msgpack.Decoder[Any]] = {}


@attrs.frozen
class Target:
    """One decoder.

    Attributes:
        read: function that decodes bytes.
        seeds: function that returns valid inputs.
        codec: `msgspec.msgpack` or `msgspec.json` if the bytes have this encoding, otherwise None.
        allowed: exceptions that `read` may raise.
    """

    read: Callable[[bytes], object]
    seeds: Callable[[random.Random], Sequence[bytes]]
    codec: Any = None
    allowed: tuple[type[Exception], ...] = (ProtocolError,)


def typed(data: bytes, kind: Any) -> Any:
    """Decode `data` as MessagePack of a type. It raises the same errors as the decoder of messages."""
    if kind not in _DECODERS:
        _DECODERS[kind] = msgspec.msgpack.Decoder(kind)
    try:
        return _DECODERS[kind].decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise ProtocolError("not of this type") from error


def _packed(*values: Any) -> list[bytes]:
    return [msgspec.msgpack.encode(v) for v in values]


def _frames(data: bytes) -> None:
    decoder = FrameDecoder(Limits())
    step = max(data[0] * 97 + 1, len(data) // 50) if data else 1
    for start in range(1, len(data), step):
        decoder.feed(data[start : start + step])
    for frame in decoder.frames:
        messages.decode(frame.head)


def _frame_seeds(draw: random.Random) -> list[bytes]:
    bodies: tuple[list[bytes], ...] = ([], [b"x" * 8], [b"", b"y" * 1500], [b"z" * 40_000])
    heads = [messages.encode(generated(kind, draw)) for kind in message_types()]
    return [
        bytes([draw.randrange(256)])
        + b"".join(
            bytes(part)
            for _ in range(draw.choice((1, 2)))
            for part in encode_frame(Frame(head, draw.choice(bodies)), Limits())
        )
        for head in heads
    ]


def _message_seeds(draw: random.Random) -> list[bytes]:
    return [messages.encode(generated(kind, draw)) for kind in message_types() for _ in range(3)]


def _numbers(data: bytes) -> None:
    inbox, outbox = Inbox(), Outbox()
    for start in range(0, len(data), 9):
        prefix, head = split(Frame(data[start : start + 9 + len(data) % 5]))
        outbox.put(Frame(head))
        outbox.acknowledge(prefix.received)
        inbox.judge(prefix.number)
        inbox.misses(prefix.number)


def _order(data: bytes) -> None:
    (orders.read_order if data[:1] == b"o" else orders.read_report)(data[1:])


def _order_seeds(draw: random.Random) -> list[bytes]:
    inputs = [
        b"o" + orders.to_line(generated(kind, draw))
        for kind in (orders.Start, orders.ReportSessions, orders.Drain, orders.Evict)
    ]
    return inputs + [
        b"a" + orders.to_line(generated(kind, draw)) for kind in (orders.Ready, orders.Failed, orders.Sessions)
    ]


def _ticket(data: bytes) -> None:
    checker = tickets.TicketChecker(KEY)
    checker.redeem(data.decode("utf-8", "replace"))
    forged = tickets._sign(KEY, data) + data
    tickets._verify(KEY, tickets.base64.urlsafe_b64encode(forged).decode())


def _ticket_seeds(draw: random.Random) -> list[bytes]:
    return [tickets.issue_ticket(KEY, "alice").encode(), msgspec.json.encode(tickets.Grant("x", 1.0, "n"))]


def _file(read: Callable[[Path], object]) -> Callable[[bytes], None]:
    folder = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    path = folder / f"file-{os.getpid()}"
    path.touch(0o600)

    def reading(data: bytes) -> None:
        path.write_bytes(data)
        read(path)

    return reading


def _compressed(data: bytes) -> None:
    if len(data) >= 12:
        item, length = struct.unpack_from("<IQ", data)
        compression.expanded(data[12:], compression.PLANES_ZSTD, max(1, item % 17), length % (1 << 27))


def _compressed_seeds(draw: random.Random) -> list[bytes]:
    plain = (b"", bytes(4000), draw.randbytes(64), b"abcd" * 500)
    return [struct.pack("<IQ", 4, len(p)) + compression.compressed(p, 4 if len(p) % 4 == 0 else 1) for p in plain]


_Bound = tuple[
    list[int], binding_delta.Handles, binding_delta.InputChanges, list[binding_delta.Slot], binding_delta.SlotChanges
]


def _bindings(data: bytes) -> None:
    before, handles, rebound, slots, changes = typed(data, _Bound)
    binding_delta.unpack_handles(handles)
    binding_delta.apply_input_changes(before, rebound)
    binding_delta.apply_slot_changes(slots, changes)


def _bindings_seeds(draw: random.Random) -> list[bytes]:
    handles = [1 << 32 | 5, 1 << 32 | 6, 7 << 32 | 6]
    return _packed(
        [
            handles,
            binding_delta.pack_handles(handles),
            binding_delta.pack_inputs((0, 2), (handles[2], handles[0])),
            [1, 2.0, 3],
            ((5, (0, 2)),),
        ]
    )


def _tensor(data: bytes) -> None:
    header, body = typed(data, tuple[messages.TensorHeader, bytes])
    tensor_from_wire(header, bytearray(body) if len(body) % 3 else body)


def _tensor_seeds(draw: random.Random) -> list[bytes]:
    kinds = (
        ("float32", (2, 3), (3, 1), 24),
        ("bool", (), (), 1),
        ("int64", (2, 2), (1, 2), 32),
        ("bfloat16", (0, 3), (3, 1), 0),
    )
    return _packed(*[[messages.TensorHeader(*kind[:3]), bytes(kind[3])] for kind in kinds])


def _template(data: bytes) -> None:
    compile_template(typed(data, messages.Template), torch.device("cpu"), OWN)


def _template_seeds(draw: random.Random) -> list[bytes]:
    return _packed(TEMPLATE, *[generated(messages.Template, draw) for _ in range(5)])


def _snapshot(data: bytes) -> None:
    snapshot, body = typed(data, tuple[bytes, tuple[bytes, ...]])
    result = decode_snapshot(snapshot)
    put_values(result, [memoryview(bytearray(b)) for b in body], ValueTable(), RUNTIME)
    for template in result.templates:
        compile_template(template.template, torch.device("cpu"), OWN)


def _snapshot_seeds(draw: random.Random) -> list[bytes]:
    items = (Item(8, (View(1 << 32 | 1, "float32", (2,), (1,)),)),)
    templates = (KnownTemplate(b"d" * 16, TEMPLATE, (), (5,)),)
    state = state_to_bytes(torch.Generator().get_state())
    whole = Snapshot(3, templates, items, ((9, 1.5), (10, (1.0, 2.0))), ((11, state),), state)
    return _packed([encode_snapshot(whole), [bytes(8)]])


def _past(path: Path) -> None:
    past = JournalReader(path)
    try:
        past.replies()
        if past.base is not None:
            past.memory()
        while not past.over:
            past.next_frame()
            past.next_decision()
    finally:
        past.close()


def _journal_seeds(draw: random.Random) -> list[bytes]:
    path = Path(tempfile.mkdtemp()) / "x.journal"
    journal = Journal.begin(path, SessionIdentity("s", "c", "secret", tickets.NO_TENANT), 1 << 20, DiskQuota())
    journal.frame(Frame(messages.encode(messages.StatsRequest()), [b"abc", b""]))
    journal.decide(lambda _: b"\1")
    short = path.read_bytes()
    journal.compact(SnapshotHeader(1, 1, b"state"), [b"memory"], [Frame(b"k")])
    journal.stopped(1, 2, "a device error")
    return [short, path.read_bytes()]


def _header(data: bytes) -> None:
    for item in typed(data, TransferHeader).items:
        allocate_item(item)


def _transfer_seeds(draw: random.Random) -> list[bytes]:
    views = (View(5, "float32", (2, 3), (3, 1), 2), View(6, "int64", (2,), (1,)))
    return _packed(TransferHeader(1, (Item(64, views), Item(64, views[:1], dense=True))), TransferHeader(1, ()))


def _uploads(data: bytes) -> None:
    uploads = UploadAssembly(RUNTIME, ValueTable(), None)
    for inputs, body in typed(data, tuple[tuple[UploadPart | BlobOffer | BlobQuery, bytes], ...]):
        if isinstance(inputs, UploadPart):
            uploads.take(inputs, [bytearray(body)])
        elif isinstance(inputs, BlobOffer):
            uploads.accept_offer(inputs)
        else:
            uploads.hold(inputs)


def _upload_seeds(draw: random.Random) -> list[bytes]:
    whole = UploadPart(5, "float32", (2, 3), (3, 1), 24)
    part = UploadPart(6, "float32", (2,), (1,), 8)
    rest = UploadPart(6, "float32", (2,), (1,), 8, start=4)
    coded = UploadPart(7, "float32", (9,), (1,), 36, compression=compression.PLANES_ZSTD, length=36)
    offer = BlobOffer(8, "int64", (1,), (1,), 8, bytes(32))
    have = BlobQuery((8,), (bytes(32),))
    sent_bytes = [
        [whole, bytes(24)],
        [part, bytes(4)],
        [rest, bytes(4)],
        [coded, compression.compressed(bytes(36), 4)],
        [offer, b""],
        [have, b""],
    ]
    return _packed(sent_bytes, sent_bytes[:1], sent_bytes[1:3])


@attrs.frozen
class _OneFile(WeightSource):
    file: MemoryFile
    name: str = "file"

    def places(self, address: str, folders: object) -> list[str]:
        """As `WeightSource.places`."""
        del folders
        return [address]

    def open(self, address: str, permissions: object) -> list[MemoryFile]:
        """As `WeightSource.open`."""
        del address, permissions
        return [self.file]


FORMATS = (Safetensors(), Checkpoints(), Gguf())


def _weights(suffix: str) -> Callable[[bytes], None]:
    """Return a target that opens a weight file with this suffix, and reads the start and the end of each tensor."""

    def read(data: bytes) -> None:
        file = MemoryFile(data, f"model{suffix}")
        stream = WeightReader([_OneFile(file)], WeightPermissions((), ("*",)), FORMATS).open("file:model")  # type: ignore[list-item]  # without descriptors
        for place in stream.tensors.values():
            entry = place.entry
            if entry.dtype is None or not entry.size:
                continue
            if entry.size > 16 * len(data):
                raise AssertionError(f"{entry.size} bytes are read from a file of {len(data)}")
            for start in {0, max(0, entry.size - 9)}:
                entry.read_into(file, start, memoryview(bytearray(min(9, entry.size - start))))

    return read


def _some_tensors() -> dict[str, torch.Tensor]:
    return {"a": torch.arange(300.0).view(100, 3), "b": torch.ones(3, dtype=torch.bfloat16), "empty": torch.empty(0, 2)}


def _checkpoint_seeds(draw: random.Random) -> list[bytes]:
    """Return archives of `torch.save` without checksums, because readers would reject mutations by their checksums."""
    tensors = _some_tensors()
    results = []
    for content in (tensors, {"model": tensors | {"t": tensors["a"].t()}, "step": 3, "name": "x"}):
        buffer = io.BytesIO()
        torch.save(content, buffer)
        results.append(buffer.getvalue())
    return results


def _gguf_seeds(draw: random.Random) -> list[bytes]:
    keys = key_value("general.architecture", 8, text("llama")) + key_value(
        "lists", 9, struct.pack("<IQ3f", 6, 3, 1, 2, 3)
    )
    return [gguf_file(_some_tensors() | {"q": (Q8_0, (32,), bytes(34))}, keys, 2)]


_NAMES = ("a", "b", "a/b", "b/a", "c.safetensors", "a/c.safetensors", "m.safetensors.index.json")
_LEADS = (
    ".",
    "..",
    "../a",
    "../models",
    "../other",
    "../other/secret.safetensors",
    "/",
    "a/../../other",
    "%2e%2e",
    "c.safetensors/..",
)


def _folders() -> Callable[[bytes], None]:
    """Return a target that opens addresses in a generated file tree. Its links may lead out of the permitted folder."""
    root = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None)).resolve()
    models, secret = root / "models", root / "other" / "secret.safetensors"
    file, hidden = save({"a": torch.ones(2)}), save({"secret": torch.ones(2)})
    leads = (*_NAMES, *_LEADS, str(secret), str(models))

    def make(kind: int, path: Path, target: str) -> None:
        if kind == 0:
            path.mkdir()
        elif kind == 1:
            path.symlink_to(target)
        elif kind == 2:
            with path.open("xb") as stream:
                stream.write(file)
        else:
            path.rename(models / target)

    def read(data: bytes) -> None:
        shutil.rmtree(root)
        for folder in (models, secret.parent):
            folder.mkdir(parents=True)
        secret.write_bytes(hidden)
        steps = data[4:64]
        for kind, name, target in zip(steps[::3], steps[1::3], steps[2::3], strict=False):
            place = models / _NAMES[name % len(_NAMES)]
            names = _NAMES if kind % 4 == 3 else leads
            with contextlib.suppress(OSError, RuntimeError):  # a loop of links
                if place.parent.resolve().is_relative_to(models):
                    make(kind % 4, place, names[target % len(names)])
        path = "/".join(leads[item % len(leads)] for item in data[1 : 2 + sum(data[:1]) % 2])
        begin = f"{models}/" if data[:1] < b"\x80" else ""
        stream = WeightReader([FileSource()], WeightPermissions((models,))).open(f"file:{begin}{path}")
        if "secret" in stream.tensors:
            raise AssertionError(f"{path} leads to a file that clients may not read")

    return read


def _token_seeds(draw: random.Random) -> list[bytes]:
    return [msgspec.json.encode(create(TokenTable(), "alice", 10.0)[0])]


TARGETS: dict[str, Callable[[], Target]] = {
    "frames": lambda: Target(_frames, _frame_seeds),
    "messages": lambda: Target(messages.decode, _message_seeds, msgspec.msgpack),
    "numbers": lambda: Target(
        _numbers, lambda draw: [struct.pack("<IIB", 1, 0, 0) + b"head", struct.pack("<IIB", 1, 0, 1)]
    ),
    "orders": lambda: Target(_order, _order_seeds, None, (StartupError,)),
    "tickets": lambda: Target(_ticket, _ticket_seeds, None, ()),
    "tokens": lambda: Target(lambda d: parse_table(d, Path("x")), _token_seeds, msgspec.json, (ConfigurationError,)),
    "connection_file": lambda: Target(
        _file(read_connection_file),
        lambda draw: [msgspec.json.encode(ConnectionFile(("tcp://x:1",), "t"))],
        msgspec.json,
        (ConfigurationError,),
    ),
    "compression": lambda: Target(_compressed, _compressed_seeds),
    "bindings": lambda: Target(_bindings, _bindings_seeds, msgspec.msgpack),
    "tensors": lambda: Target(_tensor, _tensor_seeds, msgspec.msgpack),
    "templates": lambda: Target(_template, _template_seeds, msgspec.msgpack, (ProtocolError, UnsupportedOperation)),
    "snapshots": lambda: Target(_snapshot, _snapshot_seeds, msgspec.msgpack, (DjinnError,)),
    "journals": lambda: Target(_file(_past), _journal_seeds, None, (SessionLost, ProtocolError)),
    "transfers": lambda: Target(_header, _transfer_seeds, msgspec.msgpack),
    "uploads": lambda: Target(_uploads, _upload_seeds, msgspec.msgpack),
    "safetensors": lambda: Target(
        _weights(".safetensors"), lambda draw: [save(_some_tensors(), {"k": "v"})], None, (WeightsUnavailable,)
    ),
    "checkpoints": lambda: Target(_weights(".bin"), _checkpoint_seeds, None, (WeightsUnavailable,)),
    "folders": lambda: Target(
        _folders(), lambda draw: [draw.randbytes(64) for _ in range(50)], None, (WeightsUnavailable,)
    ),
    "gguf": lambda: Target(_weights(".gguf"), _gguf_seeds, None, (WeightsUnavailable,)),
}
