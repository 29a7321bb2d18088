"""A client with a ticket that sends nonsense loses its session, and nobody else loses anything."""

from __future__ import annotations

import time

import pytest
import torch

from djinn_core.builtins.cpu import CpuRuntime
from djinn_core.errors import ProtocolError
from djinn_core.hookspecs.transports import Frame, Limits
from djinn_core.ir.form import Constant, Enumerated, Form, Operand, SlotArg
from djinn_core.server.running.replay import compile_template
from djinn_core.server.session import ExecutorSession
from djinn_core.wire.bindings import pack_handles, unpack_handles
from djinn_core.wire.message import Failure, Message
from djinn_core.wire.messages import Completed, First, Submit, Template, Upload, decode, encode
from djinn_core.wire.templates import digest_of

RELU = Form("aten::relu", (Operand(),), (), ("new",), False)


class Script:
    """Stands for a connection: hands out what it was given, keeps what it gets. No socket: what is tested is the session."""

    def __init__(self, *frames: Frame) -> None:
        self.frames = list(frames)
        self.limits = Limits()
        self.sent: list[Message] = []
        self.bytes_sent = self.bytes_received = 0

    def send(self, frame: Frame) -> None:
        self.sent.append(decode(frame.head))

    def receive(self, timeout: float | None = None) -> Frame:
        if not self.frames:
            raise EOFError
        return self.frames.pop(0)

    def close(self) -> None:
        """Nothing to close."""


def serve(*messages: Message, body: tuple[bytearray, ...] = ()) -> Script:
    script = Script(*(Frame(encode(m), body if isinstance(m, Upload) else ()) for m in messages))
    session = ExecutorSession(CpuRuntime())
    with pytest.raises(EOFError):
        session.serve(script)
    return script


def submit(template: Template, **fields: object) -> Submit:
    first = First(fields.pop("slots", ()), pack_handles(fields.pop("inputs", ())))
    bound = {name: pack_handles(handles) for name, handles in fields.items()}
    return Submit(1, digest=digest_of(template), template=template, first=first, **bound)


def upload(**changes: object) -> Upload:
    fields = {"handle": 1 << 32 | 1, "dtype": "float32", "shape": (2,), "stride": (1,), "size": 8, "start": 0}
    return Upload(**{**fields, **changes})


MALFORMED = {
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
    "a number out of turn": Submit(7),
    "half a handle": Submit(1, fetch=(1,)),
    "a handle below zero": Submit(1, free=(-5, 1)),
    "a handle beyond all": Submit(1, free=(1 << 40, 1)),
    "a view beyond all": Submit(1, free=(1, 1 << 40)),
    "an upload of an unknown dtype": upload(dtype="object"),
    "an upload beyond its size": upload(shape=(1000,)),
    "an upload with negative strides": upload(stride=(-1,)),
    "an upload that announces less than it brings": upload(size=4, shape=(1,)),
    "a part before the first": upload(start=4),
}


@pytest.mark.parametrize("message", MALFORMED.values(), ids=MALFORMED.keys())
def test_nonsense_ends_the_session_with_a_reason(message: Message) -> None:
    script = Script(Frame(encode(message), (b"\0" * 8,) if isinstance(message, Upload) else ()))
    with pytest.raises(ProtocolError, match=r"\w+ \w+"):
        ExecutorSession(CpuRuntime()).serve(script)
    assert not any(isinstance(m, Completed) and m.results for m in script.sent)


@pytest.mark.parametrize(
    "name",
    ["aten::from_file", "aten::_sparse_coo_tensor_unsafe", "os::system", "prim::Print", "aten::set_data", "load"],
)
def test_ops_beyond_the_allow_list_are_refused_and_nothing_else(name: str) -> None:
    template = Template((Form(name, (Constant("x"), SlotArg()), (), ("new",), False),), (0,), (0,), (), (0,))
    script = serve(submit(template, outputs=(6,), fetch=(6,), slots=(1,)), Submit(2, synchronize=True))
    refused, after = script.sent
    assert isinstance(refused, Completed)
    assert isinstance(refused.results[0], Failure)
    assert refused.results[0].kind == "UnsupportedOperation"
    assert isinstance(after, Completed)
    assert not after.failures


def test_good_work_is_done() -> None:
    """So that the refusals above are not refusals of everything."""
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


def test_templates_without_end_are_refused_quickly() -> None:
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


def test_a_list_of_handles_has_an_end() -> None:
    with pytest.raises(ProtocolError, match="at most 2,097,152"):
        unpack_handles((0, 0) * ((1 << 21) + 1))
