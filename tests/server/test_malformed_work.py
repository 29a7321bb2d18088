"""A client with a ticket that sends nonsense loses what it asked for, or its session, and other sessions lose nothing."""

from __future__ import annotations

import time

import msgspec
import pytest
import torch
from msgspec.structs import replace

from djinn_core.errors import ProtocolError
from djinn_core.hookspecs.transports import Frame, Limits
from djinn_core.ir.form import Constant, Enumerated, Form, ListArg, Operand, SlotArg
from djinn_core.wire import limits
from djinn_core.wire.binding_delta import pack_handles, unpack_handles
from djinn_core.wire.message_base import Failure, Message
from djinn_core.wire.messages import (
    Claim,
    Completed,
    InitialBindings,
    Submit,
    Template,
    TemplateReply,
    TemplateRequest,
    decode,
    encode,
)
from djinn_core.wire.templates import digest_of
from djinn_core.wire.upload_messages import UploadPart
from djinn_server.builtins.cpu import CpuRuntime
from djinn_server.context import ExecutorContext
from djinn_server.recovery.executor_channel import PlainExecutorChannel
from djinn_server.running.template_compiler import compile_template
from djinn_server.session import ExecutorSession

RELU = Form("aten::relu", (Operand(),), (), ("new",), False)


class ScriptedConnection:
    """A fake connection that delivers prepared frames and keeps sent frames."""

    def __init__(self, *frames: Frame) -> None:
        self.frames = list(frames)
        self.limits = Limits()
        self.sent: list[Message] = []
        self.bytes_sent = self.bytes_received = 0

    def send(self, frame: Frame) -> None:
        self.sent.append(decode(frame.head))

    def receive(self, timeout: float | None = None) -> Frame:
        if not self.frames:
            raise EOFError if timeout else TimeoutError
        return self.frames.pop(0)

    def close(self) -> None:
        """Nothing to close."""


def serve(*messages: Message, body: tuple[bytearray, ...] = ()) -> ScriptedConnection:
    script = ScriptedConnection(*(Frame(encode(m), body if isinstance(m, UploadPart) else ()) for m in messages))
    session = ExecutorSession(ExecutorContext.of(CpuRuntime()))
    with pytest.raises(EOFError):
        session.serve(PlainExecutorChannel(script))
    return script


def submit(template: Template, **fields: object) -> Submit:
    first = InitialBindings(fields.pop("slots", ()), pack_handles(fields.pop("inputs", ())))
    bound = {name: pack_handles(handles) for name, handles in fields.items()}
    return Submit(1, digest=digest_of(template), template=template, first=first, **bound)


def upload(**changes: object) -> UploadPart:
    fields = {"handle": 1 << 32 | 1, "dtype": "float32", "shape": (2,), "stride": (1,), "size": 8, "start": 0}
    return UploadPart(**{**fields, **changes})


REFUSED = {
    "a form that is not there": submit(Template((RELU,), (1,), (0, 1), (0,), (1,)), inputs=(5,), outputs=(6,)),
    "too few references": submit(Template((RELU,), (0,), (0,), (0,), ()), inputs=(5,)),
    "a value before it is made": submit(Template((RELU,), (0,), (0, 1), (), (1,)), outputs=(6,)),
    "a value made twice": submit(Template((RELU,), (0,), (0, 0), (0,), ()), inputs=(5,)),
    "a result never made": submit(Template((RELU,), (0,), (0, 1), (0,), (9,)), inputs=(5,), outputs=(6,)),
    "inputs that are not bound": submit(Template((RELU,), (0,), (0, 1), (0,), (1,)), inputs=(), outputs=(6,)),
    "slots for a form without": submit(
        Template((RELU,), (0,), (0, 1), (0,), (1,)), inputs=(5,), outputs=(6,), slots=(1,)
    ),
    "another digest": Submit(1, digest=b"x" * 16, template=Template((RELU,), (0,), (0, 1), (0,), (1,))),
    "a dtype that is not there": submit(
        Template((Form("aten::relu", (Enumerated("dtype", "os"),), (), ("new",), False),), (0,), (0,), (), (0,)),
        outputs=(6,),
    ),
}
REFUSED_UPLOADS = {
    "an unknown dtype": upload(dtype="object"),
    "beyond its size": upload(shape=(1000,)),
    "negative strides": upload(stride=(-1,)),
    "more than announced": upload(size=4, shape=(1,)),
    "a part before the first": upload(start=4),
    "too many dimensions": upload(shape=(1,) * 129, stride=(1,) * 129),
    "an unknown coding": upload(compression="lzma", length=8),
}
MALFORMED = {
    "half a handle": Submit(1, fetch=(1,)),
    "a handle below zero": Submit(1, free=(-5, 1)),
    "a handle beyond all": Submit(1, free=(1 << 40, 1)),
    "a view beyond all": Submit(1, free=(1, 1 << 40)),
}


RELU_ = Form("aten::relu_", (Operand(),), (), ("none",), False)
_GOOD = Template((RELU_, RELU), (0, 1), (0, 0, 1), (0,), (1,))
# Writes into what `upload` brings, and makes another value of it.
GOOD = Submit(
    1,
    digest=digest_of(_GOOD),
    template=_GOOD,
    first=InitialBindings((), pack_handles((1 << 32 | 1,)), pack_handles((1 << 32 | 1,))),
    outputs=pack_handles((6,)),
)
# The next submissions of a session in which one was refused: what that made, and what was uploaded before.
AFTERWARDS = (Submit(2, fetch=pack_handles((6,))), Submit(3, fetch=pack_handles((1 << 32 | 1,))))


def assert_session_works(answers: list[Message], *, written: bool = False) -> None:
    made, uploaded = answers
    assert isinstance(made, Completed)
    assert isinstance(made.results[0], Failure)
    assert isinstance(uploaded, Completed)
    assert isinstance(uploaded.results[0], Failure) is written


def test_out_of_order_submission_ends_session() -> None:
    script = ScriptedConnection(Frame(encode(Submit(7))))
    with pytest.raises(ProtocolError, match=r"submission 7 arrived after submission 0"):
        ExecutorSession(ExecutorContext.of(CpuRuntime())).serve(PlainExecutorChannel(script))
    assert not script.sent


@pytest.mark.parametrize("message", MALFORMED.values(), ids=MALFORMED.keys())
def test_invalid_handles_fail_their_submission(message: Submit) -> None:
    refused, *after = serve(upload(), message, *AFTERWARDS, body=(bytearray(8),)).sent
    assert isinstance(refused, Completed)
    assert [failure.kind for failure in refused.failures] == ["ProtocolError"]
    assert_session_works(after)


def test_internal_error_fails_its_submission(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise KeyError("\ud800")

    with monkeypatch.context() as patch:
        patch.setattr("djinn_server.session_runs.TemplateRun", broken)
        good = msgspec.structs.replace(GOOD, fetch=GOOD.outputs)
        failed, *after = serve(upload(), good, *AFTERWARDS, body=(bytearray(8),)).sent
    assert isinstance(failed, Completed)
    assert [failure.kind for failure in failed.failures] == ["KeyError"]
    assert [result.kind for result in failed.results if isinstance(result, Failure)] == ["KeyError"]
    assert_session_works(after, written=True)


def test_many_failures_fit_into_one_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "FAILURE_TEXTS", 1000)
    handles = tuple((number << 32) + 1 for number in range(2, 202))
    refused = Submit(1, fetch=pack_handles(handles), outputs=pack_handles(handles), refused="long " * 100)
    again = Submit(2, fetch=pack_handles(handles))
    for answer in serve(refused, again).sent:
        assert isinstance(answer, Completed)
        texts = [result.message for result in answer.results if isinstance(result, Failure)]
        assert len(texts) == 200
        assert len(texts[0]) == 500
        assert len(texts[-1]) == limits.FAILURE_BEGINNING


@pytest.mark.parametrize("message", REFUSED.values(), ids=REFUSED.keys())
def test_invalid_program_fails_its_results(message: Submit) -> None:
    script = serve(upload(), replace(message, fetch=pack_handles((6, 5))), *AFTERWARDS, body=(bytearray(8),))
    refused, *after = script.sent
    assert isinstance(refused, Completed)
    assert [failure.kind for failure in refused.failures] == ["ProtocolError"]
    assert all(isinstance(result, Failure) for result in refused.results)
    assert_session_works(after)


@pytest.mark.parametrize("message", REFUSED_UPLOADS.values(), ids=REFUSED_UPLOADS.keys())
def test_mismatched_upload_fails_its_value(message: UploadPart) -> None:
    wrong = replace(message, handle=9 << 32 | 9)
    fetch = Submit(1, fetch=pack_handles((wrong.handle,)))
    refused, *after = serve(upload(), wrong, fetch, *AFTERWARDS, body=(bytearray(8),)).sent
    assert isinstance(refused, Completed)
    assert [result.kind for result in refused.results if isinstance(result, Failure)] == ["ProtocolError"]
    assert_session_works(after)


@pytest.mark.parametrize(
    "changes",
    [
        {"claims": (Claim(0, 0, (1,) * 129, (1,) * 129, "float32"),)},
        {"slot_changes": (("text", (0,)),)},
        {"template": "none"},
        {"first": "none"},
    ],
    ids=str,
)
def test_undecodable_message_fails_its_results(changes: dict[str, object]) -> None:
    """The readable part of the message writes into the uploaded value."""
    unreadable = msgspec.structs.replace(GOOD, **changes)
    first = GOOD.first if changes.get("first") is None else None
    refused, *after = serve(upload(), unreadable, *AFTERWARDS, body=(bytearray(8),)).sent
    assert isinstance(refused, Completed)
    assert [failure.kind for failure in refused.failures] == ["ProtocolError"]
    assert_session_works(after, written=first is not None)


def test_template_is_requested_again_after_refusal() -> None:
    """The template is bound to other values than the client assumes."""
    fine = msgspec.structs.replace(GOOD, outputs=pack_handles((7,)))
    odd = Submit(2, digest=fine.digest, outputs=pack_handles((8,)), input_changes=(0, 1))
    again = Submit(3, digest=fine.digest, outputs=pack_handles((10,)), fetch=pack_handles((10,)))
    define = TemplateReply(fine.template, fine.first)
    good, refused, asked, answered = serve(upload(), fine, odd, again, define, body=(bytearray(8),)).sent
    assert isinstance(good, Completed)
    assert isinstance(refused, Completed)
    assert (len(good.failures), len(refused.failures)) == (0, 1)
    assert isinstance(asked, TemplateRequest)
    assert isinstance(answered, Completed)
    assert not answered.failures


def test_undecodable_template_is_refused() -> None:
    waiting = Submit(1, digest=b"x" * 16, outputs=pack_handles((6,)), fetch=pack_handles((6,)))
    define = TemplateReply("none", InitialBindings((), (), pack_handles((1 << 32 | 1,))))
    asked, refused, *after = serve(upload(), waiting, define, *AFTERWARDS, body=(bytearray(8),)).sent
    assert isinstance(asked, TemplateRequest)
    assert isinstance(refused, Completed)
    assert all(isinstance(result, Failure) for result in refused.results)
    assert_session_works(after, written=True)


def test_client_refusal_poisons_results() -> None:
    first = InitialBindings((), (), pack_handles((1 << 32 | 1,)))
    message = Submit(1, fetch=pack_handles((6,)), outputs=pack_handles((6,)), first=first, refused="too large to send")
    refused, *after = serve(upload(), message, *AFTERWARDS, body=(bytearray(8),)).sent
    assert isinstance(refused, Completed)
    assert [(f.kind, f.message) for f in refused.results] == [("UnsupportedOperation", "too large to send")]
    assert_session_works(after, written=True)


def test_indescribable_results_are_refused() -> None:
    """The client would not be able to read the reply."""
    view = Form("aten::view", (Operand(), ListArg((SlotArg(),) * 129)), (), ("new",), False)
    wide = Template((view,), (0,), (0, 1), (0,), (1,))
    first = InitialBindings((1,) * 128 + (2,), pack_handles((1 << 32 | 1,)))
    asked = {"outputs": pack_handles((6,)), "fetch": pack_handles((6,)), "describe": pack_handles((6,))}
    message = Submit(1, digest=digest_of(wide), template=wide, first=first, **asked)
    (answer,) = serve(upload(), message, body=(bytearray(8),)).sent
    assert isinstance(answer, Completed)
    (fetched,), (described,) = answer.results, answer.described
    assert (fetched.kind, described.kind) == ("UnsupportedOperation",) * 2


@pytest.mark.parametrize(
    "name",
    ["aten::from_file", "aten::_sparse_coo_tensor_unsafe", "os::system", "prim::Print", "aten::set_data", "load"],
)
def test_disallowed_ops_are_refused(name: str) -> None:
    template = Template((Form(name, (Constant("x"), SlotArg()), (), ("new",), False),), (0,), (0,), (), (0,))
    script = serve(submit(template, outputs=(6,), fetch=(6,), slots=(1,)), Submit(2, synchronize=True))
    refused, after = script.sent
    assert isinstance(refused, Completed)
    assert isinstance(refused.results[0], Failure)
    assert refused.results[0].kind == "UnsupportedOperation"
    assert isinstance(after, Completed)
    assert not after.failures


def test_valid_work_is_done() -> None:
    """Show that not all work is refused in these tests."""
    data = torch.tensor([-1.0, 2.0])
    template = Template((RELU,), (0,), (0, 1), (0,), (1,))
    script = serve(
        upload(),
        submit(template, inputs=(1 << 32 | 1,), outputs=(6,), fetch=(6,)),
        body=(bytearray(data.numpy().tobytes()),),
    )
    (completed,) = script.sent
    assert isinstance(completed, Completed)
    assert not isinstance(completed.results[0], Failure)


def test_oversized_templates_are_refused_quickly() -> None:
    none = Form("aten::relu", (Constant(None),) * 4, (), (), False)
    wide = Form("aten::relu", (Constant(None),) * 3000, (), (), False)
    for template in (
        Template((none,), (0,) * ((1 << 18) + 1), (), (), ()),
        Template((wide,), (0,) * 2000, (), (), ()),
        Template((), (), (), tuple(range((1 << 22) + 1)), ()),
        Template((), (), (), (), (0,) * ((1 << 22) + 1)),
    ):
        started = time.thread_time()
        with pytest.raises(ProtocolError, match=r"(at most|more than) [\d,]+"):
            compile_template(template, torch.device("cpu"), {})
        assert time.thread_time() - started < 1.0


def test_handle_lists_are_bounded() -> None:
    with pytest.raises(ProtocolError, match="the limit is 2,097,152"):
        unpack_handles((0, 0) * ((1 << 21) + 1))


def test_sessions_share_compiled_templates_without_hints(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []

    def compile_and_count(template: Template, *rest: object) -> object:
        compiled.append(template)
        return compile_template(template, *rest)

    monkeypatch.setattr("djinn_server.session.compile_template", compile_and_count)
    template = Template((RELU,), (0,), (0, 1), (0,), (1,))
    context = ExecutorContext.of(CpuRuntime())
    for _ in range(2):
        script = ScriptedConnection(Frame(encode(submit(template, inputs=(1 << 32,), outputs=(2 << 32,)))))
        session = ExecutorSession(context)
        with pytest.raises(EOFError):
            session.serve(PlainExecutorChannel(script))
        assert session.counters()["template_cache_misses"] == 1
    assert compiled == [template]
    wrong = replace(submit(template, inputs=(1 << 32,), outputs=(2 << 32,)), digest=bytes(16))
    with pytest.raises(EOFError):
        ExecutorSession(context).serve(PlainExecutorChannel(ScriptedConnection(Frame(encode(wrong)))))
    assert context.device.templates.get(bytes(16)) is None
