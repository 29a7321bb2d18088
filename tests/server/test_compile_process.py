"""A compiler's process, which answers one call after another."""

from __future__ import annotations

import pytest

from djinn.errors import UnsupportedOperation
from djinn.hooks import CompileProcess


@pytest.fixture(scope="module")
def process():
    process = CompileProcess(nice=0)
    yield process
    process.close()


def test_it_answers_in_bytes_and_tells_why_a_call_failed(process):
    assert process.call("base64:b64encode", b"djinn", 600.0) == b"ZGppbm4="
    first = process._process
    with pytest.raises(UnsupportedOperation, match=r"(?s)b64decode failed: .*binascii\.Error"):
        process.call("base64:b64decode", b"a", 600.0)
    assert process.call("base64:b64encode", b"djinn" * 50_000, 600.0).startswith(b"ZGppbm5kamlub")
    assert process._process is first, "one process takes all calls"


def test_after_it_has_ended_there_is_another(process):
    process.call("base64:b64encode", b"", 600.0)
    first = process._process
    first.kill()
    assert process.call("base64:b64encode", b"djinn", 600.0) == b"ZGppbm4="
    assert process._process is not first


def test_it_ends_with_what_has_started_it():
    """An executor in a program's own process has compilers that go with it."""
    process = CompileProcess(nice=0)
    process.call("base64:b64encode", b"", 600.0)
    started, calls, output = process._process, process._calls, process._output
    del process
    assert started.poll() is not None
    assert calls.closed
    assert output.closed


def test_a_call_that_takes_too_long_is_ended(process):
    with pytest.raises(UnsupportedOperation, match=r"os:system took more than 0\.05 s"):
        process.call("os:system", b"sleep 1", 0.05)
