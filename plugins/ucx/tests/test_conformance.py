import sys
from pathlib import Path

import pytest

import djinn_ucx
from djinn.testing import PluginConformance, TlsTransportConformance, TransportConformance
from djinn_ucx import UcxTransport

pytest.importorskip("ucxx")
sys.path.insert(0, str(Path(__file__).parent))
from two_processes import TwoProcesses
from warm import warm_ucx

SHARED_MEMORY = {"UCX_TLS": "shm,self", "UCX_MM_ERROR_HANDLING": "y"}


@pytest.fixture(scope="module", params=[{}, SHARED_MEMORY], ids=["tcp", "shm"])
def process_pair(request):
    with pytest.MonkeyPatch.context() as patch:
        for name, value in request.param.items():
            patch.setenv(name, value)
        transport = TwoProcesses(warm_ucx)
        yield transport
        transport.close()


class TestUcx(TransportConformance):
    """Send buffers of at least 192 KiB over UCX between two processes, by TCP or shared memory."""

    returns_descriptors = False  # those of the other process stay open

    @pytest.fixture
    def transport(self, process_pair):
        return process_pair

    @pytest.fixture
    def listen_url(self):
        return "ucx://127.0.0.1:0"

    @pytest.fixture
    def wire(self):
        return False  # the relay does not see large buffers


class TestUcxs(TlsTransportConformance):
    """Send large buffers over UCX, with frames under TLS."""

    @pytest.fixture
    def plain(self):
        return warm_ucx()

    @pytest.fixture
    def listen_url(self):
        return "ucxs://127.0.0.1:0"

    @pytest.fixture
    def wire(self):
        return False


class TestOnTheSocket(TransportConformance):
    """Send all bytes over the socket, as before the first large buffer, or to relays and foreign clients."""

    @pytest.fixture
    def transport(self):
        return UcxTransport(bulk_bytes=1 << 40)

    @pytest.fixture
    def listen_url(self):
        return "ucx://127.0.0.1:0"


class TestPlugin(PluginConformance):
    @pytest.fixture
    def plugin(self):
        return djinn_ucx
