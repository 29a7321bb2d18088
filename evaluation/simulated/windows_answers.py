"""Checks of the operating system package on simulated Windows, and of the errors of unsupported features."""

import os
import socket
import tempfile
import threading
import types
from pathlib import Path

import torch
from click.testing import CliRunner

import djinn
import djinn_commands.connect.records
from djinn.testing import open_connections
from djinn_core.cli import main
from djinn_core.protocol.net.sockets import send_buffers
from djinn_core.system import files, limits, native_stack, processes, tcp
from djinn_server.system import mappings, memory


def refused(call, *arguments):
    try:
        call(*arguments)
    except OSError:
        return True
    return False


assert refused(limits.limit_data, 1 << 40)
assert refused(limits.allow_open_files)
assert refused(memory.trimmer)
assert refused(tcp.unix_socket)
limits.leave_no_cores()
assert limits.processors() == os.cpu_count()
assert isinstance(memory.resident(), memory.OtherResident)
assert 0 < memory.free_bytes() <= memory.total_bytes()
assert not native_stack.is_on_stack(b"libtorch")

with tempfile.TemporaryDirectory() as folder:
    path = Path(folder, "file")
    path.write_bytes(b"0123456789")
    assert files.mode_of(path.stat()) == 0o600, "others are not known of"
    assert not mappings.others_may_write(path.stat())
    assert refused(os.open, folder, os.O_RDONLY), "this is not simulated"
    with path.open("r+b") as first, path.open("r+b") as second:
        assert refused(path.unlink), "this is not simulated"
        assert files.pwritev(first.fileno(), [b"", b"ab", b"c"], 4) == 2
        assert files.pread(second.fileno(), 4, 3) == b"3ab6"
        processes.lock_file(first.fileno())
        assert refused(processes.lock_file, second.fileno())
        released = threading.Timer(0.2, first.close)
        released.start()
        processes.lock_file(second.fileno(), wait=True)
        released.join()

# A slow reader: writes do not wait, small buffers are joined, and no data is lost.
one, other = socket.socketpair()
with one, other:
    tcp.wait_in_kernel(one, 0.04, 0.1)
    parts = [bytes([number % 251]) * size for number, size in enumerate([1, 70_000, 10, 3 << 20, 5] * 3)]
    late = threading.Timer(0.3, lambda: got.extend(iter(lambda: other.recv(1 << 20), b"")))
    got = []
    late.start()
    assert send_buffers(one, parts, lambda _: None) == []
    one.shutdown(socket.SHUT_WR)
    late.join()
    assert b"".join(got) == b"".join(parts)

djinn.shut_down()
for settings in ({}, {"executor": "inline"}):
    djinn.configure(**settings)
    try:
        torch.ones(1, device="remote_accelerator:0").item()
        raise SystemExit("an executor was started")
    except djinn.errors.StartupError as error:
        if "WSL" not in str(error):
            raise
djinn_commands.connect.records.sys = types.SimpleNamespace(platform="win32")  # the only module besides Djinn's package
for command in (["serve"], ["connect", "alice@box"], ["jobs"]):
    result = CliRunner().invoke(main, command)
    assert result.exit_code, result.output
    said = result.output + str(result.exception)
    assert "WSL" in said, said
assert open_connections() == ()
print("answered")
