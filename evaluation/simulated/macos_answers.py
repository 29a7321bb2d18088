"""Checks of the operating system package on simulated macOS."""

import logging
import os
import resource
import socket

import torch

from djinn_core.system import limits, native_stack, processes, tcp
from djinn_server.malloc_trim import trimmer
from djinn_server.memory.process import process_memory
from djinn_server.rlimits import allow_many_files, limit_memory
from djinn_server.system import memory


class LogLines(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.msg["event"] if isinstance(record.msg, dict) else record.getMessage())


def refused(call, *arguments):
    try:
        call(*arguments)
    except OSError:
        return True
    return False


assert limits.processors() == os.cpu_count()
limits.allow_open_files()
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (10240, resource.RLIM_INFINITY)
limits.allow_open_files()  # a second call must do nothing
limits.leave_no_cores()
assert refused(memory.trimmer)
memory.keep_few_arenas(2)
memory.keep_freed(1 << 20)
assert refused(memory.LinuxResident)
resident = memory.resident()
assert isinstance(resident, memory.OtherResident)
assert 1 << 20 < resident.now() < memory.total_bytes()
assert 0 < memory.free_bytes() <= memory.total_bytes()
assert not resident.has_peak
assert refused(resident.restart_peak)
assert refused(processes.ThreadTimes, os.getppid())
assert not native_stack.is_on_stack(b"libtorch")
with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as sock:
    tcp.keep_alive(sock)
    assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL) == 10
    tcp.set_buffer_sizes(sock, 4 << 20)
    assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) >= 1 << 17
    assert refused(tcp.PeerSilence().seconds, sock), "Linux has no such option"
logging.getLogger("djinn").addHandler(log_lines := LogLines())
logging.getLogger("djinn").setLevel(logging.INFO)
trimmer()()
trimmer()()
limit_memory(memory.total_bytes())
allow_many_files()
meter = process_memory(torch.device("cpu"), memory.total_bytes())
assert len(log_lines.lines) == 1, log_lines.lines
reserve = meter.reserve
meter.begin_run()
meter.measure(0)
meter.end_run(0)
assert meter.used_bytes() >= 0
assert (meter.peak, meter.reserve) == (0, reserve), "macOS has no peak that can be reset"
print("answered")
