"""Python without features that Windows lacks, for processes with this folder on their path and
SIMULATED_PLATFORM=win32.

Simulated: missing modules, functions, constants and methods of Python; no `/proc` and `/sys`; open files cannot be
removed or replaced, folders cannot be opened, and file modes and owners are meaningless; sockets reject the options
that they reject there; `msvcrt.locking` uses `flock`; Djinn's operating system package is imported as on Windows. Not
simulated: the kernel, the C library, PyTorch, and Djinn's other libraries, which are imported before.
"""

from __future__ import annotations

import builtins
import ctypes
import errno
import fcntl
import functools
import io
import os
import platform
import shutil
import signal
import socket
import stat
import sys
import tempfile
import types
from multiprocessing import resource_tracker

from sitecustomize import OF_THE_SYSTEM, SOCKETS_OF_LINUX, hiding, is_hidden, take_for

MODULES = ("fcntl", "grp", "posix_ipc", "pty", "pwd", "readline", "resource", "syslog", "termios", "tty")
# libraries that need the removed names at import
LIBRARIES = (
    "asyncio subprocess multiprocessing shutil tempfile getpass pathlib ssl uuid mmap selectors torch numpy attrs msgspec structlog pluggy "
    "psutil platformdirs rich.console networkx click "
    + os.environ.get("SIMULATED_LIBRARIES", "")
    + " filelock zstandard lz4.frame torch._dynamo torch.utils._sympy.functions torch.testing"
).split()
WINDOWS_HAS = {
    os: set(
        "abc abort access add_dll_directory altsep chdir chmod close closerange cpu_count curdir defpath devnull dup dup2 environ error execl "
        "execle execlp execlpe execv execve execvp execvpe extsep fdopen fsdecode fsencode fspath fstat fsync ftruncate get_exec_path "
        "get_handle_inheritable get_inheritable get_terminal_size getcwd getcwdb getenv getlogin getpid getppid isatty kill linesep link "
        "listdir lseek lstat makedirs mkdir name open pardir path pathsep pipe popen putenv read readlink remove removedirs rename renames "
        "replace rmdir scandir sep set_inheritable spawnl spawnle spawnv spawnve startfile stat stat_result statvfs_result strerror "
        "supports_bytes_environ supports_dir_fd supports_effective_ids supports_fd supports_follow_symlinks symlink system terminal_size times "
        "times_result truncate umask uname_result unlink unsetenv urandom utime waitpid waitstatus_to_exitcode walk write DirEntry PathLike "
        "EX_OK F_OK R_OK W_OK X_OK O_APPEND O_CREAT O_EXCL O_RDONLY O_RDWR O_TRUNC O_WRONLY P_NOWAIT P_NOWAITO P_WAIT SEEK_CUR SEEK_END "
        "SEEK_SET TMP_MAX GenericAlias Mapping MutableMapping st sys"
        # names that subprocesses need here, with other means on Windows
        " WNOHANG WIFSTOPPED WSTOPSIG WIFEXITED WEXITSTATUS WIFSIGNALED WTERMSIG fork_exec get_blocking set_blocking"
        # newer versions of Python
        " process_cpu_count lchmod fchmod".split()
    ),
    signal: set(
        "SIGABRT SIGFPE SIGILL SIGINT SIGSEGV SIGTERM SIG_DFL SIG_IGN Handlers Signals default_int_handler getsignal raise_signal "
        "set_wakeup_fd signal strsignal valid_signals NSIG".split()
    ),
}
GONE_OF_SOCKETS = [
    *SOCKETS_OF_LINUX,
    *(
        "AF_UNIX CMSG_LEN CMSG_SPACE MSG_DONTWAIT SCM_CREDENTIALS SCM_RIGHTS SO_RCVTIMEO SO_REUSEPORT SO_SNDTIMEO recv_fds send_fds "
        "sethostname"
    ).split(),
]
METHODS_OF_SOCKETS = ("sendmsg", "recvmsg", "recvmsg_into", "sendmsg_afalg")
GONE_OF_OTHERS = {
    "select": ("poll", "epoll", "POLLIN", "POLLOUT", "POLLHUP", "POLLERR", "POLLPRI", "POLLNVAL"),
    "time": ("tzset", "clock_gettime", "clock_gettime_ns", "clock_settime", "pthread_getcpuclockid"),
    "mmap": ("MADV_WILLNEED", "MADV_DONTNEED", "MADV_HUGEPAGE", "MAP_SHARED", "MAP_PRIVATE", "MAP_ANONYMOUS", "PROT_READ", "PROT_WRITE"),
}  # fmt: skip


def be_windows() -> None:
    for name in LIBRARIES:
        try:
            __import__(name)
        except ImportError:  # some environments lack some of them
            continue
    tempfile._os = types.SimpleNamespace(**vars(os))  # its anonymous files are Linux-specific
    resource_tracker.signal = types.SimpleNamespace(
        **vars(signal)
    )  # not needed on Windows, where spawning needs no such process
    remember = fcntl.flock, fcntl.LOCK_EX, fcntl.LOCK_NB
    for name in MODULES:
        sys.modules[name] = None
    for module, kept in WINDOWS_HAS.items():
        for name in [name for name in vars(module) if not name.startswith("_") and name not in kept]:
            if not isinstance(getattr(module, name), types.ModuleType):
                delattr(module, name)
    for name in GONE_OF_SOCKETS:
        if hasattr(socket, name):
            delattr(socket, name)
    for name in METHODS_OF_SOCKETS:
        setattr(socket.socket, name, property(functools.partial(lacks, name)))
    for module, names in GONE_OF_OTHERS.items():
        for name in names:
            if hasattr(sys.modules[module], name):
                delattr(sys.modules[module], name)
    os.O_BINARY, os.O_NOINHERIT = 0, os_cloexec
    signal.SIGBREAK = signal.Signals(10)
    sys.modules["msvcrt"] = locks(*remember)
    socket.socketpair = socketpair_over_tcp
    ctypes.CDLL = libraries_by_name(ctypes.CDLL)
    platform.libc_ver = lambda *_, **__: ("", "")
    shutil._use_fd_functions = False
    if pytests := sys.modules.get("_pytest.tmpdir"):
        pytests.get_user_id = lambda: None
    files_as_on_windows()
    import_the_package()


os_cloexec = os.O_CLOEXEC


def lacks(name: str, _: object) -> None:
    raise AttributeError(name)


def locks(flock, exclusive: int, at_once: int) -> types.ModuleType:
    """Return a `msvcrt` with only `locking`, which locks the whole file."""

    def locking(descriptor: int, mode: int, count: int) -> None:
        assert (mode, count) == (2, 1)
        assert os.lseek(descriptor, 0, os.SEEK_CUR) > 1 << 30, "other processes could not read the file"
        try:
            flock(descriptor, exclusive | at_once)
        except BlockingIOError as error:
            raise PermissionError(errno.EACCES, "Permission denied") from error

    module = types.ModuleType("msvcrt")
    module.locking, module.LK_NBLCK = locking, 2
    return module


def socketpair_over_tcp(*_: object) -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        return one, listener.accept()[0]


def libraries_by_name(real):
    class OnlyByName(real):
        def __init__(self, name, *arguments, **options):
            if name is None:
                raise TypeError("LoadLibrary() argument 1 must be str, not None")
            super().__init__(name, *arguments, **options)

    return OnlyByName


def files_as_on_windows() -> None:
    """Simulate modes, owners and folders of Windows, and locks of open files."""
    listdir, readlink, real_open, is_folder = os.listdir, os.readlink, os.open, os.path.isdir

    def refuse_open(path) -> None:
        required = os.path.realpath(path)
        for descriptor in listdir("/proc/self/fd"):
            try:
                result = readlink(f"/proc/self/fd/{descriptor}")
            except OSError:
                continue
            if result == required:
                raise PermissionError(errno.EACCES, "The process cannot access the file because it is being used", path)

    def guarded(function, paths: int):
        @functools.wraps(function)
        def guard(*arguments, **options):
            for path in arguments[:paths]:
                refuse_open(path)
            return function(*arguments, **options)

        return guard

    def shown(function):
        @functools.wraps(function)
        def as_there(path, *arguments, **options):
            if is_hidden(path):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            result = function(path, *arguments, **options)
            values, names = result.__reduce__()[1]
            kind, bits = stat.S_IFMT(result.st_mode), result.st_mode & 0o700
            mode = kind | bits | bits >> 3 | bits >> 6
            return os.stat_result((mode, *values[1:4], 0, 0, *values[6:]), names)

        return as_there

    def opened(path, flags, *arguments, **options):
        if is_folder(path):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return real_open(path, flags, *arguments, **options)

    for name, paths in (("unlink", 1), ("remove", 1), ("rename", 2), ("replace", 2)):
        setattr(os, name, guarded(getattr(os, name), paths))
    for name in ("stat", "lstat", "fstat"):
        setattr(os, name, shown(getattr(os, name)))
    for name in ("listdir", "scandir", "readlink", "access"):
        setattr(os, name, hiding(getattr(os, name)))
    os.open = hiding(opened)
    builtins.open = io.open = hiding(io.open)


def import_the_package() -> None:
    """Import Djinn's operating system package as on Windows."""
    linux, sys.platform = sys.platform, "win32"
    try:
        for name in OF_THE_SYSTEM:
            __import__(name)
    finally:
        sys.platform = linux
    take_for("win32")
