"""Transport fallback: if one way to a server fails, the client takes the next one and logs it."""

from __future__ import annotations

import socket

import pytest
import torch
from configured import configure_anew

import djinn
from djinn.testing import open_connections

REMOTE = "remote_accelerator:0"


@pytest.fixture
def configure(serving):
    yield lambda *servers, **settings: configure_anew(servers=servers, token=serving.token, **settings)
    configure_anew()


@pytest.fixture
def unreachable():
    """Return a URL at which no server listens."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        return f"tcp://127.0.0.1:{closed.getsockname()[1]}"


def device_computes():
    return (torch.arange(3.0).to(REMOTE) * 2).tolist() == [0, 2, 4]


def test_refused_tcp_falls_back_to_http(configure, unreachable, url_of, caplog):
    configure(unreachable, url_of("http"), disable=("local",))
    assert device_computes()
    assert open_connections()[0].url == url_of("http")
    assert f"fell back from {unreachable} because: no server answers" in caplog.text
    assert url_of("http") in caplog.text


def test_missing_transport_falls_back(configure, url_of, caplog):
    configure(url_of("tcp"), url_of("http"), disable=("local", "tcp"))
    assert device_computes()
    assert open_connections()[0].url == url_of("http")
    assert f"fell back from {url_of('tcp')} because:" in caplog.text
    assert "no transport for tcp:// is in use here (known: " in caplog.text


def test_all_transports_refused_raises(configure, unreachable):
    configure(unreachable, unreachable.replace("tcp", "http"), disable=("local",))
    with pytest.raises(djinn.errors.TransportError, match="cannot reach a server") as error:
        device_computes()
    assert unreachable in str(error.value)
    assert unreachable.replace("tcp", "http") in str(error.value)


def test_working_first_transport_logs_no_fallback(configure, url_of, caplog):
    configure(url_of("http"), url_of("tcp"))
    assert device_computes()
    assert open_connections()[0].url.startswith("unix://"), "the fastest way on one machine"
    assert "fell back" not in caplog.text
