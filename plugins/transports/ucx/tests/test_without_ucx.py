"""Behaviour without UCX installed: it is used where it is named and nowhere else, and announcements are checked first."""

import sys

import pytest

from djinn.testing import self_signed_tls
from djinn.transports import Limits, ProtocolError, TransportError
from djinn_core.launch.addresses import parse_url
from djinn_core.launch.listen_addresses import ListenAddress, ListenAddresses, in_places
from djinn_core.launch.tls_transports import with_tls
from djinn_core.runtime.connecting.dialling import _believed
from djinn_tcp import TcpTransport
from djinn_ucx import UcxTransport
from djinn_ucx.library import library
from djinn_ucx.opening import Offer, Opening, decode_opening, encode_opening, layout, on_the_socket

LIMITS = Limits(head=1000, body=1 << 20, buffers=4)


@pytest.mark.parametrize("secured", [False, True], ids=["plain", "tls"])
def test_a_server_listens_only_where_it_is_named(tmp_path, secured):
    tls = self_signed_tls(tmp_path) if secured else None
    transports = (UcxTransport(), TcpTransport())
    tcp, ucx = ("tcps", "ucxs") if secured else ("tcp", "ucx")

    def listening(places):
        return [one.transport.name for one in in_places(transports, tls, places)]

    assert listening(ListenAddresses()) == [tcp]
    assert listening(ListenAddresses(given={"ucx": ListenAddress(port=5560)})) == [ucx, tcp]


def test_a_client_follows_its_address_only_if_it_was_named(tmp_path):
    transports = with_tls((UcxTransport(), TcpTransport()), self_signed_tls(tmp_path))
    urls = ("ucxs://10.0.0.5:1", "tcps://10.0.0.5:2")

    def believed(reached):
        return list(_believed(urls, parse_url(reached), transports, elsewhere=False))

    assert believed("tcps://gpu:5556") == ["tcps://gpu:2"]
    assert believed("ucxs://gpu:5560") == ["ucxs://gpu:1", "tcps://gpu:2"]


def test_without_the_library_an_address_is_refused_with_the_cure(monkeypatch):
    library.cache_clear()
    monkeypatch.setitem(sys.modules, "ucxx._lib", None)
    transport = UcxTransport()
    for call in (
        lambda: transport.connect("ucx://127.0.0.1:1", LIMITS, 1.0),
        lambda: transport.listen("ucx://127.0.0.1:0", LIMITS, print),
    ):
        with pytest.raises(TransportError, match=r"pip install 'djinn-ucx\[ucx\]'"):
            call()
    assert "pip install" in transport.facts()
    library.cache_clear()


def test_what_is_announced_is_checked_before_memory_is_taken():
    opening = Opening(((1, 300_000), (0, 200_000)))
    read = decode_opening(encode_opening(opening))
    assert layout(read, 10, [b"c"], LIMITS).parts == (200_000, 300_000, b"c")
    for bad in (
        Opening(((0, 1 << 21),)),  # beyond the limits
        Opening(((2, 300_000),)),  # no such place
        Opening(((0, 300_000), (0, 300_000))),
        Opening(((0, 10),)),  # small ones would make for too many
        Opening(tuple((n, 100_000) for n in range(5))),
    ):
        with pytest.raises(ProtocolError):
            layout(bad, 10, [b"c"], LIMITS)
    for garbage in (b"\x00", b"\x92\x90", encode_opening(Opening(offer=Offer(b"a", b"short")))):
        with pytest.raises(ProtocolError):
            decode_opening(garbage)


def test_an_unauthenticated_client_may_announce_nothing():
    assert on_the_socket(Limits(16 << 10, 0, 0)) == Limits(16 << 10, 0, 1)
