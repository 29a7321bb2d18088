"""Transports that both ends have to name, as UCX, which does not encrypt: they are used where they are named and nowhere else."""

from __future__ import annotations

import pytest

from djinn.testing import self_signed_tls
from djinn_client.runtime.connecting.handshake import _usable_urls
from djinn_core.protocol.addresses import parse_url
from djinn_core.protocol.tls_transports import with_tls
from djinn_server.launch.listen_addresses import ListenAddress, ListenAddresses, listening_transports
from djinn_tcp import TcpTransport
from djinn_ucx import UcxTransport


@pytest.mark.parametrize("secured", [False, True], ids=["plain", "tls"])
def test_server_listens_only_if_named(tmp_path, secured):
    tls = self_signed_tls(tmp_path) if secured else None
    transports = (UcxTransport(), TcpTransport())
    tcp, ucx = ("tcps", "ucxs") if secured else ("tcp", "ucx")

    def listening(addresses):
        return [one.transport.name for one in listening_transports(transports, tls, addresses)]

    assert listening(ListenAddresses()) == [tcp]
    assert listening(ListenAddresses(by_transport={"ucx": ListenAddress(port=5560)})) == [ucx, tcp]


def test_client_follows_address_only_if_named(tmp_path):
    transports = with_tls((UcxTransport(), TcpTransport()), self_signed_tls(tmp_path))
    urls = ("ucxs://10.0.0.5:1", "tcps://10.0.0.5:2")

    def believed(reached):
        return list(_usable_urls(urls, parse_url(reached), transports, any_machine=False))

    assert believed("tcps://gpu:5556") == ["tcps://gpu:2"]
    assert believed("ucxs://gpu:5560") == ["ucxs://gpu:1", "tcps://gpu:2"]
