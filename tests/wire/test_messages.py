"""Messages: their kinds can be told without decoding them."""

from __future__ import annotations

import msgspec
import pytest

from djinn_core.errors import ProtocolError
from djinn_core.wire.cancel_messages import CancelSubmissions
from djinn_core.wire.messages import MESSAGES, Goodbye, ProtocolClose, Submit, decode, encode, is_of_kind

EXAMPLES = [Submit(7), CancelSubmissions((7,)), ProtocolClose("the end"), Goodbye()]
FIXED_ARRAY = 15  # elements at most of a MessagePack array whose header is one byte


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_message_kind_is_read_from_tag(message):
    found = [type(one) for one in EXAMPLES if is_of_kind(encode(message), type(one))]
    assert found == [type(message)]


def test_tag_follows_one_byte_header():
    assert [kind for kind in MESSAGES if 1 + len(msgspec.structs.fields(kind)) > FIXED_ARRAY] == []


def test_trace_context_is_optional_last_field():
    trace = f"00-{'ab' * 16}-{'cd' * 8}-01"
    assert decode(encode(Submit(3, trace=trace))).trace == trace
    assert encode(Submit(3, trace="")) == encode(Submit(3))
    names = [name for name in Submit.__struct_fields__ if name != "trace"]
    earlier = msgspec.defstruct(
        "Submit", [(name, msgspec.Raw, msgspec.Raw()) for name in names], tag="Submit", array_like=True
    )
    assert bytes(msgspec.msgpack.decode(encode(Submit(3, trace=trace)), type=earlier).sequence) == bytes([3])
    with pytest.raises(ProtocolError):
        decode(encode(Submit(3, trace="00-anything; drop table spans")))
