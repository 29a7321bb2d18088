"""One package asks the operating system; what others use exists on every platform that is supported, or is asked for there."""

from __future__ import annotations

import ast
import re

import pytest

PLACES = ("djinn_core/system/", "djinn_server/system/")
SHIPPED = {"djinn", "djinn_core", "djinn_client", "djinn_server", "djinn_native", "plugins"}
MODULES = {"fcntl", "grp", "msvcrt", "pwd", "resource", "spwd", "syslog", "winreg"}
# Members of `os`, `socket`, `signal`, `select`, `platform`, `sys` and `ctypes` that some platform lacks, or answers differently.
MEMBERS = re.compile(
    r"os\.(sched_\w+|sysconf\w*|nice|register_at_fork|getloadavg|uname|posix_\w+|memfd_create|eventfd\w*|pidfd_open|splice|sendfile"
    r"|copy_file_range|getxattr|setxattr|name|setns|unshare|timerfd_\w+"
    r"|get(e?uid|e?gid|pgid|pgrp)|set(sid|pgid|uid|gid)|fork\w*|killpg|p(read|write)v?|f?statvfs|mkfifo|f?chown|ST_\w+"
    r"|O_(CLOEXEC|NOFOLLOW|DIRECTORY|NONBLOCK|NOCTTY|BINARY|SYNC|PATH|TMPFILE))"
    r"|socket\.(TCP_(?!NODELAY)\w+|SO_(PEERCRED|KEEPALIVE|SNDBUF|RCVBUF|MARK|BINDTODEVICE)|MSG_(ZEROCOPY|NOSIGNAL|DONTWAIT)|AF_UNIX|SO_(RCV|SND)TIMEO)"
    r"|select\.(e?poll|kqueue|POLL\w+)|signal\.(signalfd|prctl|pthread_\w+|SIG(KILL|HUP|USR\d|ALRM|CHLD|BREAK))|mmap\.MADV_\w+"
    r"|platform\.(system|libc_ver|release|uname|mac_ver|win32_ver)|sys\.(platform|getwindowsversion)"
    r"|ctypes\.(CDLL|cdll|PyDLL)"
)
FILES = re.compile(r"^/(proc|sys|dev/shm)(/|$)")
# Files without any of these words are not read any closer.
WORDS = re.compile(
    rf"\b({'|'.join(sorted(MODULES))})\b|\b(os|socket|select|signal|mmap|platform|sys|ctypes)(\.| import)|/(proc|sys|dev/shm)\b"
)
FORKING = ("os.fork", "os.pidfd_open", "os.setpgid", "select.POLLIN", "select.poll", "socket.AF_UNIX", "sys.platform")
UCX = "plugins/ucx/djinn_ucx/endpoints.py"
FAKEGPU = "plugins/fakegpu/djinn_fakegpu/"
CONNECT = "plugins/commands/djinn_commands/connect/"
KNOWN = {
    ("djinn_native/__init__.py", "ctypes.CDLL"): "its own library, by its path",
    ("djinn_native/setup.py", "sys.platform"): "flags of compilers, before Djinn is installed",
    ("djinn_native/building/compiler_here.py", "sys.platform"): "the same",
    ("djinn_core/torch_private.py", "ctypes.CDLL"): "PyTorch's own library, by its path",
    (
        "plugins/launchers/djinn_launchers/fork_server_client.py",
        "socket.AF_UNIX",
    ): "not on Windows, where nothing is forked",
    ("plugins/launchers/djinn_launchers/fork_server_client.py", "sys.platform"): "the same, for mypy",
    **{
        ("plugins/launchers/djinn_launchers/fork_server.py", name): "Linux alone: nothing is forked elsewhere"
        for name in FORKING
    },
    **{
        (UCX, name): "in a process of its own, where there is UCX: not on Windows"
        for name in ("os.fork", "resource", "sys.platform")
    },
    **{
        (FAKEGPU + name, what): "a device of Linux alone"
        for name, what in (
            ("device.py", "sys.platform"),
            ("exports.py", "/proc/self/fd/"),
            ("process.py", "os.fork"),
            ("process.py", "sys.platform"),
        )
    },
    # The package cannot be imported without PyTorch, for which these commands do not wait; Windows is refused.
    (CONNECT + "keeper.py", "os.fork"): "goes on in the background",
    (CONNECT + "keeper.py", "os.setsid"): "the same",
    (CONNECT + "keeper.py", "signal.SIGHUP"): "the same",
    (CONNECT + "keeper.py", "sys.platform"): "the same",
    (CONNECT + "records.py", "os.getuid"): "the user of a folder",
    (CONNECT + "records.py", "sys.platform"): "the same",
}


def asked(tree: ast.Module) -> set[str]:
    """Names of everything that a module asks of the operating system by itself."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name in MODULES}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module} & MODULES
            found |= {name for alias in node.names if MEMBERS.fullmatch(name := f"{node.module}.{alias.name}")}
        elif isinstance(node, ast.Attribute):
            if isinstance(node.value, ast.Name) and MEMBERS.fullmatch(name := f"{node.value.id}.{node.attr}"):
                found.add(name)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and FILES.match(node.value):
            found.add(node.value)
    return found


def test_platform_calls_are_in_two_folders(root, sources):
    guilty = {}
    for path in sources:
        place = path.relative_to(root).as_posix()
        if place.partition("/")[0] not in SHIPPED or "/tests/" in place:
            continue
        if place.startswith(PLACES):
            continue
        text = path.read_text()
        found = {what for what in (asked(ast.parse(text)) if WORDS.search(text) else ()) if (place, what) not in KNOWN}
        if found:
            guilty[place] = sorted(found)
    assert guilty == {}, f"ask for it in {PLACES[0]}, with an implementation for each platform"


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import resource", {"resource"}),
        ("import os\nos.sched_getaffinity(0)", {"os.sched_getaffinity"}),
        ("from os import sysconf", {"os.sysconf"}),
        ("Path('/proc/self/statm')", {"/proc/self/statm"}),
        ("Path(f'/proc/{process}/task')", {"/proc/"}),
        ("import socket\nsocket.TCP_INFO, socket.TCP_NODELAY", {"socket.TCP_INFO"}),
        ("import sys\nsys.platform == 'linux'", {"sys.platform"}),
        ("import os, socket\nos.getuid(), socket.AF_UNIX", {"os.getuid", "socket.AF_UNIX"}),
        ("import os\nos.getpid(), '/process'", set()),
    ],
)
def test_platform_calls_are_found(source, found):
    assert asked(ast.parse(source)) == found


def test_known_exceptions_exist(root):
    for place, what in KNOWN:
        assert what in asked(ast.parse((root / place).read_text()))
