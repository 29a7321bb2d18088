import pytest

from djinn.testing import TransportConformance
from djinn_tcp import TcpTransport


class TestTcps(TransportConformance):
    @pytest.fixture
    def transport(self, tls):
        return TcpTransport().secured(tls)

    @pytest.fixture
    def listen_url(self):
        return "tcps://127.0.0.1:0"
