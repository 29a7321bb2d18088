"""Python without Linux-only features, as on macOS, for processes with this folder on their path and
SIMULATED_PLATFORM=darwin.

Simulated: missing functions and constants of Python's modules; no `/proc` and `/sys`, except for psutil, which uses
other means on macOS; too large socket buffers and too many open files are rejected; the C library returns no memory;
Djinn's operating system package is imported as on macOS. Not simulated: the kernel, the C library and PyTorch.
"""

from __future__ import annotations

import builtins
import ctypes
import errno
import functools
import io
import os
import pathlib
import platform
import resource
import select
import signal
import sys
import types

SIMULATED = os.environ.get("SIMULATED_PLATFORM") == "darwin"
if SIMULATED:  # before the import of `selectors`, which `socket` and `subprocess` import
    for _name in [name for name in vars(select) if name.startswith("EPOLL") or name == "epoll"]:
        delattr(select, _name)

import socket  # noqa: E402
import subprocess  # noqa: E402, F401 - imported while this is Linux: it looks for what is gone

if SIMULATED:
    import psutil  # noqa: F401 - the same

HIDDEN = ("/proc", "/sys")
OPEN_MAX = 10240
MAX_BUFFER_BYTES = 1 << 20
# names of `socket` that macOS and Windows lack
SOCKETS_OF_LINUX = (
    "AF_NETLINK AF_PACKET AF_VSOCK MSG_CMSG_CLOEXEC MSG_CONFIRM MSG_ERRQUEUE MSG_MORE MSG_NOSIGNAL SOCK_CLOEXEC SOCK_NONBLOCK "
    "SO_BINDTODEVICE SO_DOMAIN SO_MARK SO_PASSCRED SO_PEERCRED SO_PRIORITY SO_PROTOCOL TCP_CONGESTION TCP_CORK TCP_DEFER_ACCEPT TCP_INFO "
    "TCP_LINGER2 TCP_QUICKACK TCP_USER_TIMEOUT"
).split()
# `pidfd_open` and `waitid` stay, because tests start processes with them
GONE = {
    os: (
        "O_DIRECT O_NOATIME O_PATH O_TMPFILE copy_file_range eventfd eventfd_read eventfd_write fdatasync getresgid getresuid getxattr "
        "listxattr memfd_create pipe2 posix_fadvise posix_fallocate removexattr sched_getaffinity sched_getparam sched_getscheduler "
        "sched_setaffinity sched_setparam sched_setscheduler setns setresgid setresuid setxattr splice timerfd_create unshare"
    ).split(),
    socket: [*SOCKETS_OF_LINUX, "TCP_KEEPIDLE"],
    signal: "SIGPOLL SIGPWR SIGRTMAX SIGRTMIN sigtimedwait sigwaitinfo".split(),
    resource: ("RLIMIT_MSGQUEUE RLIMIT_NICE RLIMIT_RTPRIO RLIMIT_RTTIME RLIMIT_SIGPENDING prlimit").split(),
}
OF_THE_SYSTEM = (
    *(f"djinn_core.system.{name}" for name in ("files", "limits", "native_stack", "processes", "tcp")),
    *(f"djinn_server.system.{name}" for name in ("mappings", "memory")),
)
NO_FUNCTION = {"malloc_trim", "mallopt", "prctl", "tgkill", "gettid"}


def is_hidden(path: object) -> bool:
    """Return True for a Linux-only path, unless psutil opens it."""
    if isinstance(path, int):
        return False
    try:
        text = os.fspath(path)
    except TypeError:
        return False
    text = os.fsdecode(text)
    if not (text in HIDDEN or text.startswith(tuple(f"{hidden}/" for hidden in HIDDEN))):
        return False
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] == "psutil":
            return False
        frame = frame.f_back
    return True


def hiding(function):
    """Return `function` with a check that raises FileNotFoundError for hidden paths."""

    @functools.wraps(function)
    def without(path=".", *arguments, **options):
        if is_hidden(path):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return function(path, *arguments, **options)

    return without


def hide_files() -> None:
    builtins.open = io.open = hiding(io.open)
    for name in ("open", "stat", "lstat", "listdir", "scandir", "readlink", "access", "statvfs"):
        setattr(os, name, hiding(getattr(os, name)))
    if hasattr(pathlib, "io"):  # before Python 3.13
        pathlib.io.open = io.open


def refuse_as_macos() -> None:
    """Apply the limits of macOS on open files and socket buffers."""
    set_limit, get_limit, set_option = resource.setrlimit, resource.getrlimit, socket.socket.setsockopt
    soft = [256]

    def getrlimit(kind):
        return (soft[0], resource.RLIM_INFINITY) if kind == resource.RLIMIT_NOFILE else get_limit(kind)

    def setrlimit(kind, limits):
        if kind != resource.RLIMIT_NOFILE:
            set_limit(kind, limits)
        elif not 0 <= limits[0] <= OPEN_MAX:
            raise ValueError("current limit exceeds maximum limit")
        else:
            soft[0] = limits[0]

    def setsockopt(self, level, option, *value):
        if (
            level == socket.SOL_SOCKET
            and option in {socket.SO_SNDBUF, socket.SO_RCVBUF}
            and value[0] > MAX_BUFFER_BYTES
        ):
            raise OSError(errno.ENOBUFS, os.strerror(errno.ENOBUFS))
        set_option(self, level, option, *value)

    resource.getrlimit, resource.setrlimit, socket.socket.setsockopt = getrlimit, setrlimit, setsockopt


def without_functions_of_glibc() -> None:
    result = ctypes.CDLL.__getattr__

    def lookup(self, name):
        if name in NO_FUNCTION:
            raise AttributeError(name)
        return result(self, name)

    ctypes.CDLL.__getattr__ = lookup
    platform.libc_ver = lambda *_, **__: ("", "")


def be_macos() -> None:
    for module, names in GONE.items():
        for name in names:
            if hasattr(module, name):
                delattr(module, name)
    hide_files()
    refuse_as_macos()
    without_functions_of_glibc()
    linux, sys.platform = sys.platform, "darwin"
    try:
        for name in OF_THE_SYSTEM:
            __import__(name)
    finally:
        sys.platform = linux
    take_for("darwin")


def take_for(platform: str) -> None:
    """Let Djinn's imported operating system modules see `platform` as `sys.platform`."""
    for name in OF_THE_SYSTEM:
        module = sys.modules.get(name)
        if hasattr(module, "sys"):
            module.sys = types.SimpleNamespace(platform=platform)


if SIMULATED:
    be_macos()
elif os.environ.get("SIMULATED_PLATFORM") == "win32":
    import simulated_windows

    simulated_windows.be_windows()
