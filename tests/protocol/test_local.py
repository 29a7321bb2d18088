import socket
import stat
from pathlib import Path
from urllib.parse import quote

import pytest

from djinn.testing import TransportConformance
from djinn_core.errors import TransportError
from djinn_core.protocol.local import LocalTransport
from djinn_core.system.tcp import MAX_PATH_BYTES
from djinn_core.wire.frames import Limits


class TestLocal(TransportConformance):
    @pytest.fixture
    def transport(self):
        return LocalTransport()

    @pytest.fixture
    def listen_url(self):
        return "unix://"


def refuse(connection):
    connection.close()


def listen(url):
    return LocalTransport().listen(url, Limits(), refuse)


def test_only_the_user_may_connect(tmp_path):
    for url in (f"unix://{tmp_path}/new/server.sock", "unix://"):
        listener = listen(url)
        path = Path(listener.url.removeprefix("unix://"))
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        listener.close()
        assert not path.exists()
    assert not path.parent.exists()


def test_world_writable_directory_is_refused(tmp_path):
    tmp_path.chmod(0o777)
    with pytest.raises(TransportError, match="other users can replace files"):
        listen(f"unix://{tmp_path}/server.sock")


def test_too_long_socket_path_is_refused(tmp_path):
    url = f"unix://{tmp_path}/{'x' * 120}.sock"
    for use in (listen, lambda url: LocalTransport().connect(url, Limits(), 1)):
        with pytest.raises(
            TransportError, match=rf"may take {MAX_PATH_BYTES} bytes, .* takes \d+; choose a shorter one"
        ):
            use(url)


def test_only_dead_sockets_are_replaced(tmp_path):
    path = tmp_path / "server.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    listener = listen(f"unix://{path}")
    with pytest.raises(TransportError, match="another server listens"):
        listen(f"unix://{path}")
    listener.close()


def test_closing_listener_keeps_socket_of_successor(tmp_path):
    url = f"unix://{tmp_path}/server.sock"
    first = listen(url)
    (tmp_path / "server.sock").unlink()
    second = listen(url)
    first.close()
    LocalTransport().connect(url, Limits(), 1).close()
    second.close()


def test_regular_file_is_not_replaced(tmp_path):
    (tmp_path / "server.sock").write_text("precious")
    with pytest.raises(TransportError, match="cannot listen"):
        listen(f"unix://{tmp_path}/server.sock")
    assert (tmp_path / "server.sock").read_text() == "precious"


@pytest.mark.parametrize("url", ["unix://relative.sock", "tcp:///tmp/x", "unix://host/x.sock"])
def test_malformed_addresses_are_refused(url):
    with pytest.raises(TransportError, match="write unix:///absolute/path"):
        LocalTransport().connect(url, Limits(), 1)


def test_path_with_spaces_and_percent_signs(tmp_path):
    path = tmp_path / "50% of it"
    path.mkdir(mode=0o700)
    listener = listen(f"unix://{quote(str(path))}/s.sock")
    LocalTransport().connect(listener.url, Limits(), 1).close()
    assert (path / "s.sock").is_socket()
    listener.close()
