import pytest

from djinn.testing import self_signed_tls


@pytest.fixture(scope="session")
def tls(tmp_path_factory):
    """TLS options of a server and its clients."""
    return self_signed_tls(tmp_path_factory.mktemp("tls"))
