import pytest

from djinn.testing import TransportConformance
from djinn_core.builtins.local import LocalTransport


class TestLocal(TransportConformance):
    @pytest.fixture
    def transport(self):
        return LocalTransport()

    @pytest.fixture
    def listen_url(self):
        return "unix://"
