"""Without UCX installed: an address is refused with a remedy, and announcements are checked first."""

import re
import sys
import tomllib
from pathlib import Path

import pytest

from djinn.errors import ProtocolError, TransportError
from djinn.hooks import Limits
from djinn_ucx import UcxTransport
from djinn_ucx.library import library
from djinn_ucx.opening import Offer, Opening, decode_opening, encode_opening, layout, socket_limits

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
(REQUIREMENT,) = PROJECT["optional-dependencies"]["ucx"]
LIMITS = Limits(head=1000, body=1 << 20, buffers=4)


def test_missing_library_error_says_what_to_install(monkeypatch):
    library.cache_clear()
    monkeypatch.setitem(sys.modules, "ucxx._lib", None)
    transport = UcxTransport()
    for call in (
        lambda: transport.connect("ucx://127.0.0.1:1", LIMITS, 1.0),
        lambda: transport.listen("ucx://127.0.0.1:0", LIMITS, print),
    ):
        with pytest.raises(TransportError, match=re.escape(f"pip install '{REQUIREMENT}'")):
            call()
    assert "pip install" in transport.facts()
    library.cache_clear()


def test_announced_sizes_are_checked_before_allocation():
    opening = Opening(((1, 300_000), (0, 200_000)))
    read = decode_opening(encode_opening(opening))
    assert layout(read, 10, [b"c"], LIMITS).parts == (200_000, 300_000, b"c")
    for bad in (
        Opening(((0, 1 << 21),)),  # beyond the limits
        Opening(((2, 300_000),)),  # no such position
        Opening(((0, 300_000), (0, 300_000))),
        Opening(((0, 10),)),  # small buffers over UCX would allow too many of them
        Opening(tuple((n, 100_000) for n in range(5))),
    ):
        with pytest.raises(ProtocolError):
            layout(bad, 10, [b"c"], LIMITS)
    for garbage in (b"\x00", b"\x92\x90", encode_opening(Opening(offer=Offer(b"a", b"short")))):
        with pytest.raises(ProtocolError):
            decode_opening(garbage)


def test_unauthenticated_client_cannot_announce_buffers():
    assert socket_limits(Limits(16 << 10, 0, 0)) == Limits(16 << 10, 0, 1)
