"""Drop privileges of an executor with its own system user, before it serves a client."""

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
# Calls that an executor and its compilers do not need: they look into other processes, or reach parts of the kernel that had faults.
REFUSED: Final = (
    "ptrace process_vm_readv process_vm_writev pidfd_getfd kcmp perf_event_open "
    "bpf userfaultfd add_key request_key keyctl io_uring_setup io_uring_enter io_uring_register "
    "mount umount2 pivot_root chroot unshare setns open_by_handle_at move_mount open_tree fsopen fsconfig fsmount "
    "init_module finit_module delete_module kexec_load kexec_file_load reboot swapon swapoff acct quotactl syslog "
    "iopl ioperm modify_ldt personality"
).split()
_log = get_logger("djinn.server")


def confine_process() -> None:
    """Forbid this process and its children new privileges, and the system calls in `REFUSED` (EPERM).

    Without the package `pyseccomp` or libseccomp, log this and forbid no system calls.

    Raises:
        StartupError: the process has rights of root, or the kernel refuses to confine it.
    """
    if user_id() == 0 or capabilities():
        raise StartupError(
            "an executor that must run as a tenant's system user has rights of root: report this as a bug"
        )
    program = ctypes.CDLL(None, use_errno=True)
    if program.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        raise StartupError(f"an executor cannot give up rights: {os.strerror(ctypes.get_errno())}")
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
        except (OSError, ValueError, RuntimeError) as error:  # this machine or library does not know the call
            _log.debug("a system call is not refused", call=name, reason=str(error))
    try:
        calls.set_attr(seccomp.Attr.CTL_TSYNC, 1)  # for threads that libraries have started
        calls.load()
    except OSError as error:
        raise StartupError(
            f"an executor cannot refuse system calls: {error}. Uninstall pyseccomp to run without"
        ) from error
