"""Drop the privileges of an executor that runs as a tenant's system user, before it serves a client."""

from __future__ import annotations

import ctypes
import errno
import importlib
import os
from typing import Any, Final

from djinn_core.errors import StartupError
from djinn_core.logs import get_logger
from djinn_core.system.accounts import capabilities
from djinn_core.system.files import user_id

_PR_SET_NO_NEW_PRIVS: Final = 38
# System calls that executors and compilers do not need. They access other processes, or parts of the kernel with a history of faults.
REFUSED: Final = (
    "ptrace process_vm_readv process_vm_writev pidfd_getfd kcmp perf_event_open "
    "bpf userfaultfd add_key request_key keyctl io_uring_setup io_uring_enter io_uring_register "
    "mount umount2 pivot_root chroot unshare setns open_by_handle_at move_mount open_tree fsopen fsconfig fsmount "
    "init_module finit_module delete_module kexec_load kexec_file_load reboot swapon swapoff acct quotactl syslog "
    "iopl ioperm modify_ldt personality"
).split()
_log = get_logger("djinn.server")


def confine_process() -> None:
    """Deny this process and its children new privileges, and the system calls in `REFUSED`, which fail with EPERM.

    Without the package `pyseccomp` or libseccomp, log a warning and deny no system calls.

    Raises:
        StartupError: the process has rights of root, or the kernel refuses to confine it.
    """
    if user_id() == 0 or capabilities():
        raise StartupError(
            "an executor that must run as a tenant's system user has rights of root: report this as a bug"
        )
    program = ctypes.CDLL(None, use_errno=True)
    if program.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        raise StartupError(f"an executor cannot drop privileges: {os.strerror(ctypes.get_errno())}")
    try:
        seccomp: Any = importlib.import_module("pyseccomp")
    except (ImportError, RuntimeError, OSError) as error:
        _log.warning(
            "an executor of --tenant-user refuses no system calls: run `pip install pyseccomp`, and install libseccomp",
            reason=str(error),
        )
        return
    _refuse_calls(seccomp)


def _refuse_calls(seccomp: Any) -> None:
    calls = seccomp.SyscallFilter(seccomp.ALLOW)
    for name in REFUSED:
        try:
            calls.add_rule(seccomp.ERRNO(errno.EPERM), name)
        except (OSError, ValueError, RuntimeError) as error:  # unknown to this machine or library
            _log.debug("cannot refuse a system call", call=name, reason=str(error))
    try:
        calls.set_attr(seccomp.Attr.CTL_TSYNC, 1)  # for threads that libraries have started
        calls.load()
    except OSError as error:
        raise StartupError(
            f"an executor cannot refuse system calls: {error}. To run without this protection, uninstall pyseccomp"
        ) from error
