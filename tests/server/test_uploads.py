"""Uploads to a server that keeps weights: offered, sent in the background of what goes on, and left in order by interrupts."""

from __future__ import annotations

import io
import weakref

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

import djinn
from djinn_client.runtime import client
from djinn_client.runtime.sending import uploads
from djinn_client.sink import Submission
from djinn_core.errors import RemoteError, SessionLost
from djinn_core.hookspecs.observers import Event
from djinn_core.ir.handles import new_handle
from djinn_core.ir.program import Program
from djinn_core.wire.compression import PLANES_ZSTD, compressed
from djinn_core.wire.frames import Frame
from djinn_core.wire.messages import encode
from djinn_core.wire.upload_messages import BlobQuery, UploadPart
from djinn_observability.progress import ServerProgress, TerminalBar, UploadProgress, djinn_register_observers
from tests.shared.executors import only_executor

SIZE = 3 << 20
ZEROS = compressed(bytes(4096), 4)


class InterruptedConnection:
    """A connection that presses Ctrl-C at the client's `at`-th wait."""

    def __init__(self, connection, at):
        self._connection = connection
        self._left = at

    def __getattr__(self, name):
        return getattr(self._connection, name)

    def receive(self, timeout=None):
        self._left -= 1
        if self._left == -1:
            raise KeyboardInterrupt
        return self._connection.receive(timeout)


class LateConnection:
    """A connection that delivers nothing before the client waits."""

    def __init__(self, connection):
        self._connection = connection

    def __getattr__(self, name):
        return getattr(self._connection, name)

    def receive(self, timeout=None):
        if timeout == 0:
            raise TimeoutError
        return self._connection.receive(timeout)


def test_upload_wait_names_user_line(keeping, monkeypatch):
    monkeypatch.setattr(uploads, "COPY_BYTES", 1 << 20)
    link = only_executor().link
    monkeypatch.setattr(link, "channel", LateConnection(link.channel))
    model = torch.nn.Sequential(*[torch.nn.Linear(600, 600) for _ in range(2)])
    with djinn.explain_waits() as report:
        model.to("remote_accelerator:0")
    assert {wait.cause for wait in report.waits} == {"an upload"}
    assert all("model.to(" in wait.text for wait in report.waits)


@pytest.mark.parametrize("at", [0, 1, 2, 3])
def test_interrupted_upload_keeps_its_contents(keeping, monkeypatch, at):
    monkeypatch.setattr(uploads, "COPY_BYTES", 1 << 20)
    monkeypatch.setattr(uploads, "CHUNK", 1 << 20)
    executor = only_executor()
    source = torch.randint(0, 256, (SIZE,), dtype=torch.uint8)
    expected = source.clone()
    target = torch.empty(SIZE, dtype=torch.uint8, device="remote_accelerator:0")
    connection = executor.link.channel
    monkeypatch.setattr(executor.link, "channel", InterruptedConnection(connection, at))
    with pytest.raises(KeyboardInterrupt):
        target.copy_(source)
    monkeypatch.setattr(executor.link, "channel", connection)
    source.zero_()
    assert torch.equal(target.cpu(), expected)
    assert not executor.uploads.open
    assert not executor.uploads.queries


def test_handle_is_offered_again_after_its_value_was_freed(keeping):
    """A router copies a value to an executor for each part that reads it."""
    executor, handle, replies = only_executor(), new_handle(), []
    values = [torch.randint(0, 256, (SIZE,), dtype=torch.uint8) for _ in range(2)]
    for value in values:
        executor.upload(handle, value)
        replies.append(executor.submit(Submission(Program((), (), ()), free=(handle,), fetch=(handle,))))
    for value, reply in zip(values, replies, strict=True):
        assert torch.equal(reply.wait().tensors[0], value)


def test_upload_shows_progress_bar(keeping):
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, width=120)
    observer = UploadProgress(lambda: TerminalBar(console), patience=0.0)
    with client.observed_by(observer):
        torch.manual_seed(1)
        model = torch.nn.Sequential(*[torch.nn.Linear(512, 512, bias=False) for _ in range(6)])
        again = torch.nn.Sequential(*[torch.nn.Linear(512, 512, bias=False) for _ in range(6)])
        again.load_state_dict(model.state_dict())
        model.to("remote_accelerator:0").cpu()
        assert "/6.3 MB" in shown.getvalue()
        assert "cached on the server" not in shown.getvalue()
        again.to("remote_accelerator:0").cpu()
        assert "GB cached on the server" in shown.getvalue()
    assert observer._bar is None, "it ends with the upload"


def test_server_read_shows_progress_bar():
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, width=120)
    observer = ServerProgress(lambda: TerminalBar(console), patience=2.0)
    for seconds, done in enumerate((0, 1 << 30, 2 << 30, 3 << 30)):
        observer.observe(Event("downloading", float(seconds), "client", {"done": done, "expected": 4 << 30}))
        assert ("The server downloads" in shown.getvalue()) == (seconds >= 2)
    assert "/4.3 GB" in shown.getvalue()
    observer.observe(Event("downloading", 4.0, "client", {"done": 4 << 30, "expected": 4 << 30}))
    assert observer._bar is None
    for seconds in (5.0, 8.0):
        observer.observe(Event("reading", seconds, "client", {"done": 1, "expected": 1000}))
    assert "The server reads" in shown.getvalue()
    observer.observe(Event("submitted", 9.0, "client"))
    assert observer._bar is None


def test_no_progress_bar_without_terminal(monkeypatch):
    assert djinn_register_observers() == []
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    bars = djinn_register_observers()
    assert [bar.name for bar in bars] == ["upload_progress", "server_progress"]
    with client.observed_by(bars[0]), client.observed_by(bars[1]):
        assert [client.context.observers.wants(name) for name in ("uploading", "reading")] == [True, True]
        try:
            djinn.configure(progress=False)
            assert [client.context.observers.wants(name) for name in ("uploading", "reading")] == [False, False]
        finally:
            djinn.configure(progress=True)


def test_weights_on_server_disk_are_not_uploaded(keeping):
    local = load_file(keeping)
    djinn.reset_stats()
    remote = {name: weight.to("remote_accelerator:0") for name, weight in local.items()}
    djinn.synchronize()
    sent = djinn.stats()
    assert sent["bytes_uploaded"] == 0
    assert sent["bytes_recalled"] == sum(weight.nbytes for weight in local.values())
    assert sent["bytes_sent"] < 200 * len(local) + 200
    for weight in remote.values():
        weight.mul_(2)
    assert all(torch.equal(remote[name].cpu(), local[name] * 2) for name in local)
    assert torch.equal(local["0.weight"].to("remote_accelerator:0").cpu(), local["0.weight"]), (
        "what is found is private"
    )


def test_large_module_tensors_are_offered_together(keeping, monkeypatch):
    monkeypatch.setattr(uploads, "COPY_BYTES", 1 << 18)
    local = load_file(keeping)
    model = torch.nn.ParameterList(torch.nn.Parameter(local[f"{n}.weight"]) for n in range(1, 6))
    model.append(torch.nn.Parameter(torch.randn(256, 512)))
    model.append(torch.nn.Parameter(local["1.weight"].clone()))
    model.append(torch.nn.Parameter(torch.randn(7)))
    expected = [parameter.detach().clone() for parameter in model]
    djinn.reset_stats()
    model.to("remote_accelerator:0")
    assert djinn.stats()["round_trips"] <= 3, "for all; for that which the server lacks; for that which comes twice"
    for parameter, right in zip(model, expected, strict=True):
        assert torch.equal(parameter.cpu(), right)
    uploading = only_executor().uploads
    assert not uploading.open
    assert not uploading.queries


def test_memory_of_offered_tensor_is_not_reused(keeping, monkeypatch):
    """Tensors are identified by address, so another tensor at the address would be mistaken for the first."""
    monkeypatch.setattr(uploads, "COPY_BYTES", 1 << 18)
    executor = only_executor()
    arrays = [np.ones(1 << 20, np.uint8) for _ in range(2)]
    alive = [weakref.ref(array) for array in arrays]
    executor.expect_uploads([torch.from_numpy(array) for array in arrays])
    arrays.clear()
    assert all(reference() is not None for reference in alive)
    executor.expect_uploads([])
    assert all(reference() is None for reference in alive)


def test_offers_end_after_module_move(keeping, monkeypatch):
    monkeypatch.setattr(uploads, "COPY_BYTES", 1 << 18)
    # Neither is uploaded from where it lies: there is something between its rows.
    model = torch.nn.ParameterList(torch.nn.Parameter(torch.randn(256, 600)[:, :512]) for _ in range(2))
    right = [parameter.detach().clone() for parameter in model]
    model.to("remote_accelerator:0")
    assert all(torch.equal(parameter.cpu(), expected) for parameter, expected in zip(model, right, strict=True))
    assert not only_executor().uploads._expected_uploads


def test_slow_link_compresses_uploads(keeping, monkeypatch):
    weights = torch.randn(2 << 20).to(torch.bfloat16)
    deciding = only_executor().uploads._compressor
    monkeypatch.setattr(deciding, "_measured_bytes", 32 << 20)
    monkeypatch.setattr(deciding, "_measured_seconds", 10.0)
    djinn.reset_stats()
    remote = weights.to("remote_accelerator:0")
    assert torch.equal(remote.cpu(), weights)
    sent = djinn.stats()
    assert sent["bytes_uploaded"] == weights.nbytes
    assert sent["bytes_sent"] < 0.75 * weights.nbytes


@pytest.mark.parametrize(
    ("message", "body", "reason"),
    [
        (UploadPart(3 << 40, "float32", (1024,), (1,), 4096, 0, PLANES_ZSTD, 4096), ZEROS[:-2], "compressed data"),
        (UploadPart(4 << 40, "float32", (1024,), (1,), 4096, 0, PLANES_ZSTD, 8192), ZEROS, "compressed data"),
        (UploadPart(5 << 40, "float32", (512,), (1,), 2048, 0, PLANES_ZSTD, 4096), ZEROS, "announced 2048 bytes"),
        (UploadPart(6 << 40, "float32", (1024,), (1,), 4096, 0, "lzma", 4096), ZEROS, "cannot read"),
    ],
    ids=["truncated", "longer than it is", "beyond the tensor", "unknown coding"],
)
def test_mismatched_bytes_fail_their_value(keeping, message, body, reason):
    executor = only_executor()
    executor.link.send(Frame(encode(message), [body]))
    with pytest.raises(RemoteError, match=reason):
        executor.submit(Submission(Program((), (), ()), fetch=(message.handle,))).wait()
    djinn.synchronize()


@pytest.mark.parametrize(
    ("message", "body", "reason"),
    [
        (BlobQuery((1, 2), (bytes(32),)), [], "1 digests but 2 sizes"),
        (BlobQuery((1,) * 4097, (bytes(32),) * 4097), [], "length <= 4096"),
    ],
    ids=["sizes", "too many"],
)
def test_invalid_upload_message_ends_session(keeping, message, body, reason):
    only_executor().link.send(Frame(encode(message), body))
    with pytest.raises(SessionLost, match=reason):
        djinn.synchronize()
    djinn.init()
