import pytest

from djinn.testing import self_signed_tls


@pytest.fixture(scope="session")
def tls(tmp_path_factory):
    """What a server and its clients know of a certificate."""
    return self_signed_tls(tmp_path_factory.mktemp("tls"))
