import pytest

from djinn.testing import TransportConformance
from djinn_tcp import TcpTransport


class TestTcp(TransportConformance):
    @pytest.fixture
    def transport(self):
        return TcpTransport()

    @pytest.fixture
    def listen_url(self):
        return "tcp://127.0.0.1:0"
