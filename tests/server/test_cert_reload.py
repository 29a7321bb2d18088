"""A certificate that is renewed while a server runs is shown to new connections; existing ones stay."""

from __future__ import annotations

import sys

import pytest

from djinn_core.errors import TransportError
from djinn_core.hookspecs.transports import Frame, Limits, TlsOptions
from djinn_core.protocol.net.tls_contexts import CertificateRenewal, fingerprint_of_file
from djinn_server.launch.self_signed import self_signed

SECONDS = 120.0


def echo(connection):
    while True:
        connection.send(connection.receive(SECONDS))


def echoes(connection, word):
    connection.send(Frame(word))
    return connection.receive(SECONDS).head == word


@pytest.fixture
def renewals(monkeypatch):
    """Return the started renewal checks, which run when the test triggers them."""
    started = []

    def start(renewal):
        started.append(renewal)

    monkeypatch.setattr(CertificateRenewal, "start", start)
    return started


@pytest.fixture(params=["tcp", "http"])
def tls_listener(request, registry, tmp_path, renewals):
    """Return a listener with a certificate, and a function that connects with a fingerprint."""
    first, second = (self_signed(tmp_path / name) for name in ("first", "second"))
    transport = next(t for t in registry.transports if t.schemes[0] == request.param)
    listener = transport.over_tls(TlsOptions(first.certificate, first.key)).listen(
        f"{request.param}s://127.0.0.1:0", Limits(), echo
    )
    opened = []

    def connect(*fingerprints):
        tls = TlsOptions(fingerprints=fingerprints)
        opened.append(transport.over_tls(tls).connect(listener.url, Limits(), SECONDS))
        assert echoes(opened[-1], b"hello")
        return opened[-1]

    yield connect, first, second
    for connection in opened:
        connection.close()
    listener.close()


def test_renewed_certificate_is_used_for_new_connections(tls_listener, renewals):
    connect, shown, new = tls_listener
    old, renewed = fingerprint_of_file(shown.certificate), fingerprint_of_file(new.certificate)
    there = connect(old, renewed)  # over HTTP it is several connections, of which some come later
    shown.certificate.write_bytes(new.certificate.read_bytes())
    assert [renewal.reload_if_changed() for renewal in renewals] == [True]
    connect(old)  # half of a pair changes nothing
    shown.key.write_bytes(new.key.read_bytes())
    assert [renewal.reload_if_changed() for renewal in renewals] == [True]
    connect(renewed)
    with pytest.raises(TransportError, match=r"sha256:.* was expected"):
        connect(old)
    assert echoes(there, b"still here")


LOOKS = """
import sys
from pathlib import Path
from djinn_core.protocol.net.tls_contexts import fingerprint_of_file

file, reversed_line = Path(sys.argv[1]), sys.argv[2].encode()
for _ in range(20):
    file.touch()  # it is read again
    print(fingerprint_of_file(file))
found = 0
with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", 0) as memory:
    for line in maps:
        span, mode, *_ = line.split()
        start, end = (int(number, 16) for number in span.split("-"))
        if mode.startswith("rw") and start < 1 << 63:
            memory.seek(start)
            found += memory.read(end - start)[::-1].count(reversed_line)
print(found)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a process reads its own memory")
def test_fingerprint_of_file_leaves_no_private_key_in_memory(tmp_path, python, plain_environment):
    made = self_signed(tmp_path / "made")
    both, key = tmp_path / "both.pem", made.key.read_text()
    both.write_text(key + made.certificate.read_text())
    line = key.splitlines()[2]
    told = python.run("-c", LOOKS, both, line[::-1], env=plain_environment).stdout.split()
    assert set(told[:-1]) == {fingerprint_of_file(made.certificate)}
    assert told[-1] == "0"
