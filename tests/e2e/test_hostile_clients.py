"""Hostile clients: one without a token gets nothing, and one that breaks the protocol does no harm to others."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch

import djinn
from djinn_client.runtime.connecting.open import open_connections
from djinn_core.errors import AccessRefused, SessionLost, TransportError
from djinn_core.hookspecs.transports import Frame, Limits
from djinn_core.ir.form import Constant, Form, Operand, SlotArg
from djinn_core.registry.builtin_plugins import builtin_plugins
from djinn_core.registry.registry import load_registry
from djinn_core.registry.selection import Selection
from djinn_core.settings import Settings
from djinn_core.wire.binding_delta import pack_handles
from djinn_core.wire.message_base import Failure
from djinn_core.wire.messages import (
    Completed,
    Goodbye,
    InitialBindings,
    ProtocolClose,
    StatsReply,
    StatsRequest,
    Submit,
    Template,
    decode,
    encode,
)
from djinn_core.wire.templates import digest_of
from djinn_core.wire.upload_messages import UploadPart
from tests.shared.executors import only_executor

REMOTE = "remote_accelerator:0"
SECONDS = 120.0
START_SECONDS = 300.0  # on a machine that does other things besides
RELU = Form("aten::relu", (Operand(),), (), ("new",), False)
HANDLE = 1 << 32 | 1


@pytest.fixture(scope="module")
def check_healthy_client(python, serving, url_of, plain_environment, tmp_path_factory):
    """Yield a function that waits until a continuously generating client has made progress since the last call."""
    output = tmp_path_factory.mktemp("healthy") / "output"
    environ = plain_environment | {"DJINN_SERVERS": url_of("tcp"), "DJINN_TOKEN": serving.token}
    script = Path(__file__).with_name("healthy_client.py")
    reading, writing = os.pipe()
    with output.open("wb") as file, os.fdopen(reading) as given:
        process = python.start(script, env=environ, stdin=given, stdout=file, stderr=file)
    seen = 0

    def progress():
        nonlocal seen
        deadline = time.monotonic() + START_SECONDS
        while len(lines := output.read_text().splitlines()) < seen + 2:  # one may have been under way before
            assert process.poll() is None, output.read_text()
            assert time.monotonic() < deadline, "the healthy client stands still"
            time.sleep(0.02)
        seen = len(lines)
        assert set(lines) == {"same"}, lines[-20:]

    progress()
    yield progress
    os.close(writing)
    assert process.wait(SECONDS) == 0, output.read_text()


@pytest.fixture(scope="module")
def registry():
    return load_registry(Selection(disable=frozenset({"local"})), builtins=builtin_plugins(), kinds={"transports"})


@pytest.fixture(params=["tcp", "http"])
def session(request, serving, url_of, registry, check_healthy_client):
    """Yield an authenticated connection. At the end, check that another client still makes progress."""
    (opened,) = open_connections(Settings(servers=(url_of(request.param),), token=serving.token), registry)
    assert opened.url.startswith(request.param)
    yield opened.connection
    opened.connection.close()
    check_healthy_client()


def request(connection, message, body=()):
    connection.send(Frame(encode(message), body))
    return decode(connection.receive(SECONDS).head)


@pytest.mark.parametrize("scheme", ["tcp", "http"])
@pytest.mark.parametrize("token", ["wrong" * 8, "x"])
def test_wrong_token_is_refused(check_healthy_client, url_of, serving, scheme, token):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DJINN_CONFIG", "")
        djinn.shut_down()
        djinn.configure(servers=[url_of(scheme)], token=token, disable=("local",))
        with pytest.raises(AccessRefused, match="does not know the token") as refused:
            torch.ones(2).to(REMOTE).cpu()
        djinn.shut_down()
        djinn.configure()
    assert serving.token not in str(refused.value)
    check_healthy_client()


def template(**changes):
    """Return a template that computes one value from another."""
    plain = {"forms": (RELU,), "code": (0,), "references": (0, 1), "inputs": (0,), "outputs": (1,)}
    return Template(**plain | changes)


def submit(given, sequence=1, **others):
    bound = {"inputs": (HANDLE,), "outputs": (HANDLE + 1,), "slots": ()} | others
    first = InitialBindings(bound.pop("slots"), pack_handles(bound.pop("inputs")))
    outputs, fetch = pack_handles(bound.pop("outputs")), pack_handles(bound.pop("fetch", ()))
    return Submit(
        sequence,
        **{"digest": digest_of(given), "template": given, "first": first} | bound,
        outputs=outputs,
        fetch=fetch,
    )


BROKEN = {
    "no message": Frame(b"\xc1"),
    "text": Frame(b"GET / HTTP/1.1"),
    "a message for clients": Frame(encode(Completed(1))),
    "a number left out": Frame(encode(submit(template(), sequence=7))),
}
REFUSED = {
    "another digest": Frame(encode(submit(template(), digest=b"\0" * 16))),
    "a form that is not there": Frame(encode(submit(template(code=(5,))))),
    "too few references": Frame(encode(submit(template(references=(0,))))),
    "a value before it is made": Frame(encode(submit(template(references=(3, 1))))),
    "a value that is never made": Frame(encode(submit(template(outputs=(9,))))),
    "too few inputs": Frame(encode(submit(template(), inputs=()))),
    "too many slots": Frame(encode(submit(template(), slots=(1, 2)))),
    "changes of nothing": Frame(encode(submit(template(), first=None, slot_changes=((1, (0,)),)))),
    "bindings of nothing": Frame(encode(submit(template(), first=None, input_changes=(0, 1, 1)))),
    "half a binding": Frame(encode(submit(template(), input_changes=(0, 1)))),
}
REFUSED_UPLOADS = {
    "an upload beyond its size": Frame(encode(UploadPart(HANDLE, "float32", (1000,), (1,), 16)), [bytes(16)]),
    "an upload of no dtype": Frame(encode(UploadPart(HANDLE, "object", (1,), (1,), 16)), [bytes(16)]),
    "a strange stride": Frame(encode(UploadPart(HANDLE, "float32", (4,), (1 << 62,), 16)), [bytes(16)]),
    "the middle of an upload": Frame(encode(UploadPart(HANDLE, "float32", (4,), (1,), 16, start=8)), [bytes(8)]),
    "an upload without data": Frame(encode(UploadPart(HANDLE, "float32", (4,), (1,), 16))),
}


@pytest.mark.parametrize("frame", REFUSED.values(), ids=REFUSED)
def test_invalid_program_keeps_session(session, frame):
    session.send(frame)
    answer = decode(session.receive(SECONDS).head)
    assert isinstance(answer, Completed)
    assert [failure.kind for failure in answer.failures] == ["ProtocolError"]
    assert isinstance(request(session, StatsRequest()), StatsReply)
    session.send(Frame(encode(Goodbye())))


@pytest.mark.parametrize("frame", REFUSED_UPLOADS.values(), ids=REFUSED_UPLOADS)
def test_invalid_upload_poisons_value(session, frame):
    session.send(frame)
    answer = request(session, Submit(1, fetch=pack_handles((HANDLE,))))
    assert [failure.kind for failure in answer.results] == ["ProtocolError"]
    assert isinstance(request(session, StatsRequest()), StatsReply)
    session.send(Frame(encode(Goodbye())))


@pytest.mark.parametrize("frame", BROKEN.values(), ids=BROKEN)
def test_protocol_violation_ends_session_with_reason(session, frame):
    session.send(frame)
    answer = decode(session.receive(SECONDS).head)
    assert isinstance(answer, ProtocolClose)
    assert len(answer.reason) > 20
    with pytest.raises(TransportError):
        session.receive(SECONDS)


def test_oversized_frame_ends_session(session):
    session.limits = Limits(head=1 << 30)  # this end would not let it pass
    # A proper message, which would be answered if it were read.
    form = Form("aten::no_such_op", (Constant("x" * Limits().head),), (), (), False)
    given = template(forms=(form,), references=(), inputs=(), outputs=())
    with pytest.raises(TransportError):
        session.send(Frame(encode(submit(given, inputs=(), outputs=()))))
        while isinstance(decode(session.receive(SECONDS).head), ProtocolClose):
            pass


FORBIDDEN = {
    "another namespace": Form("os::system", (SlotArg(),), (), ("new",), False),
    "files": Form("aten::from_file", (SlotArg(),), (), ("new",), False),
    "foreign memory": Form("aten::set_.source_Storage", (Operand(), SlotArg()), (), ("none",), False),
    "no such op": Form("aten::no_such_op", (Operand(),), (), ("new",), False),
}


@pytest.mark.parametrize("form", FORBIDDEN.values(), ids=FORBIDDEN)
def test_disallowed_op_keeps_session(session, form):
    session.send(Frame(encode(UploadPart(HANDLE, "float32", (4,), (1,), 16)), [bytes(16)]))
    takes, makes = form.operand_count, form.new_count
    references, outputs = tuple(range(takes + makes)), tuple(range(takes, takes + makes))
    given = template(forms=(form,), references=references, inputs=(0,) * takes, outputs=outputs)
    message = submit(given, inputs=(HANDLE,) * takes, outputs=(HANDLE + 1,) * makes, slots=(1,) * form.slot_count)
    answer = request(session, message)
    assert isinstance(answer, Completed)
    (failure,) = answer.failures
    assert isinstance(failure, Failure)
    assert failure.kind == "UnsupportedOperation"
    assert form.op in failure.message
    assert isinstance(request(session, StatsRequest()), StatsReply)
    session.send(Frame(encode(Goodbye())))


def test_oversized_upload_fails_alone(session):
    session.send(Frame(encode(UploadPart(HANDLE, "float32", (1,), (1,), 1 << 60)), [bytes(16)]))
    answer = request(session, Submit(1, fetch=pack_handles((HANDLE,))))
    assert [failure.kind for failure in answer.results] == ["OutOfMemoryError"]
    assert isinstance(request(session, StatsRequest()), StatsReply)


def test_broken_session_raises_and_restarts(over, check_healthy_client):
    values = torch.arange(4.0).to(REMOTE)
    only_executor().link.channel.send(Frame(b"\xc1"))
    with pytest.raises(SessionLost, match=r"cannot read a message[^$]*djinn\.init\(\)"):
        (values + 1).cpu()
    with pytest.raises(SessionLost):
        values.cpu()
    djinn.init()
    assert (torch.arange(4.0).to(REMOTE) + 1).tolist() == [1, 2, 3, 4]
    check_healthy_client()


def test_reason_is_read_after_failed_send(over):
    values = torch.arange(4.0).to(REMOTE)
    djinn.synchronize()
    connection = only_executor().link.channel
    connection.send(Frame(b"\xc1"))
    with pytest.raises(TransportError):
        for _ in range(1000):
            connection.send(Frame(encode(StatsRequest()), [bytes(1 << 16)]))
            time.sleep(0.01)
    with pytest.raises(SessionLost, match="cannot read a message"):
        (values + 1).cpu()
    djinn.init()
