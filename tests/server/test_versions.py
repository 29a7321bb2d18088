"""A client and a server of different versions: they work together, or connecting says what to install where.

The client's versions are fakes, sent to a real server: `dialling` says them.
"""

from __future__ import annotations

import msgspec
import pytest
import torch

import djinn
from djinn_client.runtime.connecting import handshake
from djinn_core.registry.version import djinn_version
from djinn_core.wire.messages import PROTOCOL_VERSION, Hello


@pytest.fixture
def client_of(connect, url_of, monkeypatch):
    """Return a function that connects a client of other versions."""

    def client_of(kind=Hello, version="26.99.0", torch_version=str(torch.__version__), protocol=PROTOCOL_VERSION):
        def hello(_protocol, token, _version, _torch, *rest):
            return kind(protocol, token, version, torch_version, *rest)

        monkeypatch.setattr(handshake, "Hello", hello)
        return connect(url_of("tcp"))

    return client_of


class LaterHello(Hello, frozen=True, tag="Hello"):
    """A Hello of a later version, with one more field."""

    more: str = "later"


def test_other_versions_work_with_same_protocol(client_of):
    with client_of(LaterHello, torch_version="2.11.0"):
        assert (torch.ones(3, device="remote_accelerator:0") + 1).sum().item() == 6


@pytest.mark.parametrize(
    ("protocol", "cure"),
    [
        (PROTOCOL_VERSION - 1, f"install Djinn {djinn_version()} at the client, with all of its packages"),
        (PROTOCOL_VERSION + 1, "install Djinn 26.99.0 on the server, with all of its packages"),
    ],
)
def test_other_protocol_is_refused_with_cure(client_of, protocol, cure):
    with pytest.raises(djinn.errors.AccessRefused, match=cure), client_of(LaterHello, protocol=protocol):
        pass


def test_hello_of_earlier_version_is_understood():
    early = msgspec.msgpack.encode(["Hello", PROTOCOL_VERSION - 1, "token", "26.1.0", "2.11.0"])
    assert msgspec.msgpack.decode(early, type=Hello).protocol == PROTOCOL_VERSION - 1
