"""The digest of the allow-list, which clients keep on disk."""

from __future__ import annotations

import msgspec
import pytest

from djinn_client.runtime.connecting import handshake
from djinn_client.runtime.connecting.handshake import cached_operators_digest
from djinn_core.ir import operators
from djinn_core.ir.operators import operators_digest
from djinn_core.system.directories import cache_directory


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_operators_digest_is_cached(monkeypatch):
    made = cached_operators_digest()
    assert made == operators_digest()
    monkeypatch.setattr(operators, "operators_digest", lambda: "made anew")
    assert cached_operators_digest() == made


def test_changed_files_or_ops_change_operators_digest(monkeypatch):
    cached_operators_digest()
    monkeypatch.setattr(operators, "operators_digest", lambda: "made anew")
    known = handshake.torch_private.dispatched_operators()
    monkeypatch.setattr(handshake.torch_private, "dispatched_operators", lambda: [*known, "aten::new_one"])
    assert cached_operators_digest() == "made anew"


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'{"a": 1}', b"\xff", b" " * (handshake.BYTES_LIMIT + 1)])
def test_unusable_cache_file_is_replaced(content):
    path = cache_directory() / "operators.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    assert cached_operators_digest() == operators_digest()
    assert operators_digest() in msgspec.json.decode(path.read_bytes()).values()


def test_digest_is_computed_if_cache_is_not_writable(tmp_path, monkeypatch):
    file = tmp_path / "a file"
    file.write_bytes(b"")
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    assert cached_operators_digest() == operators_digest()
