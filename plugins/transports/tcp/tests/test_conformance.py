import pytest

from djinn.testing import TransportConformance
from djinn_tcp import TcpTransport


class TestTcp(TransportConformance):
    @pytest.fixture
    def transport(self):
        return TcpTransport()

    @pytest.fixture(params=["127.0.0.1", "[::1]"])
    def listen_url(self, request):
        return f"tcp://{request.param}:0"
