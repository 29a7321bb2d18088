"""Mutations of client messages that mostly stay well-formed: other numbers, ops, operands, shapes, handles."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from djinn_core.hookspecs.transports import Frame
from djinn_core.ir.form import Constant, Enumerated, Form, ListArg
from djinn_core.ir.operators import allowed_operators
from djinn_core.wire import messages
from djinn_core.wire.cache_messages import CacheRequest
from djinn_core.wire.messages import Submit, Template, decode, encode
from djinn_core.wire.numeric_messages import NumericSettings
from djinn_core.wire.peer_messages import (
    AwaitTransfer,
    DropPeer,
    MeasureLink,
    PeerTicketRequest,
    SendValues,
    TransferChunk,
    TransferHeader,
)
from djinn_core.wire.templates import digest_of
from djinn_core.wire.timing_messages import TimingsRequest
from djinn_core.wire.upload_messages import BlobOffer, BlobQuery, UploadPart
from djinn_core.wire.weight_messages import (
    OpenWeights,
    PublishedRequest,
    ReadProgressRequest,
    ReadWeights,
    RemoveWeights,
    SaveWeights,
    SmallFilesRequest,
)
from evaluation.fuzz.generating import generated
from evaluation.fuzz.mutating import changed_tree

NUMBERS = (-(2**63), -(2**31), -7, -2, -1, 0, 1, 2, 3, 5, 17, 64, 1000, 2**20, 2**31, 2**40, 2**63 - 1, 2**64 - 1)
FLOATS = (0.0, -0.0, 0.5, -1.0, 1e300, float("inf"), float("-inf"), float("nan"))
OTHERS = (
    SendValues,
    AwaitTransfer,
    TransferHeader,
    TransferChunk,
    PeerTicketRequest,
    MeasureLink,
    DropPeer,
    messages.StatsRequest,
    TimingsRequest,
    CacheRequest,
    NumericSettings,
    messages.ValueHints,
    BlobQuery,
    BlobOffer,
    OpenWeights,
    ReadWeights,
    ReadProgressRequest,
    SaveWeights,
    PublishedRequest,
    RemoveWeights,
    SmallFilesRequest,
)
NAMES = sorted(allowed_operators())
replace = msgspec.structs.replace


def mutate(frame: Frame, draw: random.Random) -> Frame:
    """Return the frame with a few changes, or rarely a random message. Control messages mostly stay unchanged."""
    message, way = decode(frame.head), draw.random()
    if way < 0.03:
        return Frame(encode(generated(draw.choice(OTHERS), draw)))
    if way < 0.08:
        tree = changed_tree(msgspec.msgpack.decode(frame.head), draw, draw.choice((1, 1, 2)))
        return Frame(msgspec.msgpack.encode(tree), frame.body)
    if isinstance(message, Submit):
        return Frame(encode(_changed_submit(message, draw)))
    return _changed_upload(message, frame, draw) if isinstance(message, UploadPart) else frame


def _number(before: Any, draw: random.Random) -> int | float:
    if isinstance(before, float):
        return draw.choice((draw.choice(FLOATS), before * 2, -before, draw.choice(NUMBERS[4:12])))
    near = (before + 1, before - 1, before * 2, -before, 0, 1)
    other = draw.choice((draw.choice(near), draw.choice(near), draw.choice(NUMBERS), draw.choice(FLOATS)))
    return other if isinstance(other, float) or -(2**63) <= other < 2**64 else 0


def _one_changed(
    items: Sequence[Any], draw: random.Random, change: Callable[[Any, random.Random], Any]
) -> tuple[Any, ...]:
    out = list(items)
    for _ in range(draw.choice((1, 1, 1, 2))):
        if out:
            place = draw.randrange(len(out))
            out[place] = change(out[place], draw)
    return tuple(out)


def _changed_submit(submit: Submit, draw: random.Random) -> Submit:
    ways = [_other_handles, _other_claims]
    if submit.slot_changes:
        ways += [_other_slots] * 4
    if submit.template is not None and submit.first is not None:
        ways += [_other_first_slots] * (6 if submit.first.slots else 0) + [_other_template] * 6 + [_other_inputs] * 3
    return draw.choice(ways)(submit, draw)


def _other_slots(submit: Submit, draw: random.Random) -> Submit:
    return replace(submit, slot_changes=_one_changed(submit.slot_changes, draw, lambda c, d: (_number(c[0], d), c[1])))


def _other_first_slots(submit: Submit, draw: random.Random) -> Submit:
    assert submit.first is not None
    return replace(submit, first=replace(submit.first, slots=_one_changed(submit.first.slots, draw, _number)))


def _other_inputs(submit: Submit, draw: random.Random) -> Submit:
    assert submit.first is not None
    handles = messages_handles(submit.first.inputs)
    if len(handles) > 1:
        handles[draw.randrange(len(handles))] = draw.choice(handles)
    return replace(submit, first=replace(submit.first, inputs=pack(handles)))


def _other_handles(submit: Submit, draw: random.Random) -> Submit:
    field = draw.choice(("fetch", "free", "describe", "input_changes", "outputs"))
    if field in {"fetch", "free", "describe"} and draw.random() < 0.7:
        handles = messages_handles(submit.outputs) + messages_handles(submit.fetch)
        return replace(
            submit, **{field: pack([draw.choice(handles) for _ in range(draw.randint(0, 4))] if handles else [5])}
        )
    return replace(
        submit, **{field: _one_changed(getattr(submit, field), draw, lambda n, d: n + d.choice((-1, 1, 2**32)))}
    )


def _other_claims(submit: Submit, draw: random.Random) -> Submit:
    if not submit.claims:
        return replace(submit, claims=tuple(generated(messages.Claim, draw) for _ in range(2)), synchronize=True)

    def other(claim: messages.Claim, draw: random.Random) -> messages.Claim:
        name = draw.choice(("shape", "stride", "dtype", "result"))
        if name == "dtype":
            return replace(claim, dtype=draw.choice(("float32", "bool", "int64", "x")))
        if name == "result":
            return replace(claim, result=draw.choice((0, 1, 5)))
        return replace(claim, **{name: _one_changed(getattr(claim, name), draw, lambda n, d: d.choice(NUMBERS[:-1]))})

    return replace(submit, claims=_one_changed(submit.claims, draw, other))


def _other_template(submit: Submit, draw: random.Random) -> Submit:
    template = submit.template
    assert template is not None
    way = draw.random()
    if way < 0.75:
        forms = _one_changed(template.forms, draw, _other_form)
        template = replace(template, forms=forms)
    elif way < 0.9:
        field = draw.choice(("references", "code", "outputs", "inputs", "consumed"))
        other = lambda n, d: draw.choice((n + 1, max(0, n - 1), 0, d.choice(template.references or (0,))))
        template = replace(template, **{field: _one_changed(getattr(template, field), draw, other)})
    else:
        template = _reordered(template, draw)
    return replace(submit, template=template, digest=digest_of(template))


def _reordered(template: Template, draw: random.Random) -> Template:
    references = list(template.references)
    if len(references) > 1:
        a, b = draw.randrange(len(references)), draw.randrange(len(references))
        references[a], references[b] = references[b], references[a]
    return replace(template, references=tuple(references))


def _other_form(form: Form, draw: random.Random) -> Form:
    """Return a form with another op or other arguments. The numbers of operands and slots stay the same."""
    way = draw.random()
    if way < 0.4:
        return replace(form, op=draw.choice(NAMES))
    if way < 0.6:
        args = list(form.args)
        draw.shuffle(args)
        return replace(form, args=tuple(args))
    if way < 0.75:
        return replace(form, args=tuple(_other_constant(a, draw) for a in form.args))
    if way < 0.85:
        return replace(
            form, args=(*form.args, draw.choice((Constant(None), Constant(True), Constant("mean"), ListArg(()))))
        )
    if way < 0.9:
        return replace(form, args=tuple(_nested(a, draw) for a in form.args))
    if way < 0.95:
        return replace(
            form,
            kwargs=tuple((draw.choice((k, "dtype", "out", "self")), _other_constant(a, draw)) for k, a in form.kwargs),
        )
    return replace(form, sequence=not form.sequence)


def _nested(argument: Any, draw: random.Random) -> Any:
    return ListArg((argument,) if draw.random() < 0.7 else (ListArg((argument,)),))


def _other_constant(argument: Any, draw: random.Random) -> Any:
    if isinstance(argument, Constant):
        return Constant(draw.choice((None, True, False, "sum", "mean", "reflect", "")))
    if isinstance(argument, Enumerated):
        return Enumerated(
            "dtype",
            draw.choice(
                ("float32", "float64", "int64", "bool", "complex64", "bfloat16", "uint16", "quint8", "float8_e5m2")
            ),
        )
    if isinstance(argument, ListArg):
        items = list(argument.items)
        draw.shuffle(items)
        return ListArg(tuple(_other_constant(item, draw) for item in items))
    return argument


def _changed_upload(upload: UploadPart, frame: Frame, draw: random.Random) -> Frame:
    """Return an upload with other bytes, another layout, or a wrong field, which may end the session."""
    way, body = draw.random(), frame.body
    if way < 0.5:
        data = bytearray(body[0])
        for _ in range(draw.choice((1, 2, 8))):
            if data:
                data[draw.randrange(len(data))] = draw.choice((0, 1, 0x7F, 0x80, 0xFF, draw.randrange(256)))
        return Frame(frame.head, [data])
    if way < 0.7:  # another layout within the received bytes
        count = upload.size // 4
        shape = draw.choice(((count,), (1, count), (count, 1), (0, 3), (), (2, 2)))
        stride = draw.choice((tuple([1] * len(shape)), tuple([0] * len(shape))))
        return Frame(
            encode(
                replace(upload, shape=shape, stride=stride, dtype=draw.choice(("float32", "int32", "uint8", "bool")))
            ),
            body,
        )
    field = draw.choice(("dtype", "shape", "stride", "size", "start", "compression", "length", "handle"))
    before = getattr(upload, field)
    if isinstance(before, str):
        other: Any = draw.choice(("float64", "bool", "int8", "object", "planes+zstd", ""))
    elif isinstance(before, tuple):
        other = _one_changed(before, draw, lambda n, d: d.choice((n + 1, max(0, n - 1), d.choice(NUMBERS[:-1]))))
    else:
        other = max(0, draw.choice((before + 1, before * 2, before - 1, 2**40, 0)))
    return Frame(encode(replace(upload, **{field: other})), body)


def messages_handles(packed: tuple[int, ...]) -> list[int]:
    """Return the unpacked handles."""
    from djinn_core.wire.binding_delta import unpack_handles

    return unpack_handles(packed)


def pack(handles: Sequence[int]) -> tuple[int, ...]:
    """Return the packed handles."""
    from djinn_core.wire.binding_delta import pack_handles

    return pack_handles(handles)
