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


def test_compile_process_returns_bytes_or_names_failure(process):
    assert process.call("base64:b64encode", b"djinn", 600.0) == b"ZGppbm4="
    first = process._process
    with pytest.raises(UnsupportedOperation, match=r"(?s)b64decode failed: .*binascii\.Error"):
        process.call("base64:b64decode", b"a", 600.0)
    assert process.call("base64:b64encode", b"djinn" * 50_000, 600.0).startswith(b"ZGppbm5kamlub")
    assert process._process is first, "one process takes all calls"


def test_compile_process_restarts_after_its_end(process):
    process.call("base64:b64encode", b"", 600.0)
    first = process._process
    first.kill()
    assert process.call("base64:b64encode", b"djinn", 600.0) == b"ZGppbm4="
    assert process._process is not first


def test_compile_process_ends_with_its_owner():
    """An executor inside a program's process ends its compile processes, too."""
    process = CompileProcess(nice=0)
    process.call("base64:b64encode", b"", 600.0)
    started, calls, output = process._process, process._calls, process._output
    del process
    assert started.poll() is not None
    assert calls.closed
    assert output.closed


def test_compile_call_over_time_limit_is_ended(process):
    with pytest.raises(UnsupportedOperation, match=r"os:system took more than 0\.05 s"):
        process.call("os:system", b"sleep 1", 0.05)
