"""System users of tenants. Each tenant's executors run as their own user, in folders that only this user can enter."""

from __future__ import annotations

import re
import stat
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

import attrs

from djinn_core.errors import ConfigurationError, StartupError
from djinn_core.system.accounts import find_account, give_files, missing_right
from djinn_core.system.files import mode_of, user_id
from djinn_core.system.private_directories import check_private_directory
from djinn_server.launch.token_table import check_tenant

NO_USER: Final = 2**32 - 1  # setreuid() with this user id changes nothing, so that root would stay root
_ENTRY: Final = re.compile(r"(?P<tenant>[^=]+)=(?P<user>[^=]+)")
# Variables that name folders of the gateway's account, and the subfolders that replace these folders.
_OWN_FOLDERS: Final = {"HOME": "", "TMPDIR": "tmp", "XDG_CACHE_HOME": "cache", "XDG_CONFIG_HOME": "config",
                       "XDG_DATA_HOME": "data", "XDG_STATE_HOME": "state"}  # fmt: skip
# Names of variables that an executor receives: of the loader, Python, PyTorch, accelerators and their libraries.
_PASSED: Final = re.compile(
    r"PATH|LANG|LANGUAGE|LC_\w+|TZ|NO_COLOR|LD_LIBRARY_PATH|LD_PRELOAD|PYTHON\w*|CC|CXX|SSL_CERT_(FILE|DIR)|MALLOC_\w+|GLIBC_TUNABLES|"
    r"THP_MEM_ALLOC_ENABLE|DJINN_(LOG_FORMAT|HTTP_HOSTS|NATIVE_SANITIZE)|(CUDA|NVIDIA|CUDNN|CUBLAS|NCCL|HIP|HSA|ROCR|ROCM|MIOPEN|ZE|SYCL|"
    r"UCX|OMP|GOMP|KMP|MKL|DNNL|ONEDNN|OPENBLAS|TORCH|PYTORCH|TORCHINDUCTOR|TRITON)_\w+"
)
_SECRET: Final = re.compile("KEY|TOKEN|SECRET|PASS|CREDENTIAL|AUTH", re.IGNORECASE)


@attrs.frozen
class SystemUser:
    """The system user of a tenant.

    Attributes:
        name: name of the user, or the user id if it has no name.
        uid, gid: user id and group id of the processes, which have no further groups.
        folder: folder of the user's files, with mode 0700.
    """

    name: str
    uid: int
    gid: int
    folder: Path

    def environment(self, parent: Mapping[str, str], pass_variables: Iterable[str] = ()) -> dict[str, str]:
        """Return the environment variables of an executor, with this user's folders and name.

        Of `parent`, only well-known harmless variables and `pass_variables` (as in `ExecutorConfig`) are included.
        """
        entries = [entry.partition("@") for entry in pass_variables]
        patterns = [pattern for pattern, _, tenant in entries if tenant in {"", self.folder.name}]
        variables = {name: value for name, value in parent.items() if _is_inherited_variable(name, patterns)}
        variables |= {name: str(self.folder / subfolder) for name, subfolder in _OWN_FOLDERS.items()}
        return variables | {"USER": self.name, "LOGNAME": self.name}

    def make_subfolders(self) -> None:
        """Create the folders in which libraries store caches and settings. The process must run as this user.

        Raises:
            OSError: a folder cannot be created.
        """
        for subfolder in filter(None, _OWN_FOLDERS.values()):
            (self.folder / subfolder).mkdir(mode=0o700, exist_ok=True)


def _is_inherited_variable(name: str, patterns: Iterable[str]) -> bool:
    harmless = _PASSED.fullmatch(name) is not None and _SECRET.search(name) is None
    return harmless or any(fnmatchcase(name, pattern) for pattern in patterns)


def give_folder(folder: Path, user: SystemUser) -> None:
    """Create a folder that only `user` can enter (mode 0700), or check that an existing folder is such a folder.

    Raises:
        OSError: the folder cannot be created.
        ConfigurationError: the folder belongs to another user, or is a link.
    """
    try:
        folder.mkdir(mode=0o700)
        give_files(folder, user.uid, user.gid)
    except FileExistsError:
        status = folder.lstat()
        if status.st_uid == user_id():  # a gateway was killed after `mkdir`, or ran without --tenant-user
            raise ConfigurationError(
                f"{folder} belongs to the gateway's user, but --tenant-user requires that it belongs to {user.name}: run `chown -R {user.uid}:{user.gid} "
                f"{folder}`, or remove it"
            ) from None
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != user.uid or mode_of(status) & 0o077:
            raise ConfigurationError(
                f"{folder} must be a folder of the user {user.name} with mode 0700, but it has user id {status.st_uid} and mode "
                f"{mode_of(status):04o}: correct or remove it"
            ) from None


def open_users(entries: Iterable[str], base: Path | None, shared: Sequence[Path] = ()) -> dict[str, SystemUser]:
    """Return the system user of each tenant. Create the users' folders.

    Args:
        entries: values of `--tenant-user`, such as `alice=djinn-a` or `alice=70001`.
        base: parent of the users' folders.
        shared: other folders that all users must be able to enter.

    Raises:
        ConfigurationError: an entry is invalid, a user does not exist, is root or has two tenants, `base` is missing, or this
            process may not change users.
        StartupError: a user cannot run this Python or enter a folder, or has no folder.
    """
    users: dict[str, SystemUser] = {}
    for entry in entries:
        parts = _ENTRY.fullmatch(entry)
        if parts is None:
            raise ConfigurationError(
                f"--tenant-user {entry!r} must be TENANT=USER, such as alice=djinn-a or alice=70001"
            )
        if base is None:
            raise ConfigurationError(
                "--tenant-user needs --tenant-dir: a folder in which each tenant gets a private folder, such as /var/lib/djinn"
            )
        check_tenant(parts["tenant"])
        if parts["tenant"] in users:
            raise ConfigurationError(f"--tenant-user names the tenant {parts['tenant']!r} twice: leave one out")
        users[parts["tenant"]] = _user(parts["user"], base.resolve() / parts["tenant"])
    _check_users(users)
    try:
        for user in users.values():
            user.folder.parent.mkdir(mode=0o711, parents=True, exist_ok=True)
            check_private_directory(user.folder.parent, "folders of tenants")
            give_folder(user.folder, user)
            _check_reachable(user, shared)
    except OSError as error:
        raise StartupError(
            f"a tenant's folder in {base} cannot be used: {error}. --tenant-dir names another"
        ) from error
    return users


def _user(name: str, folder: Path) -> SystemUser:
    account = find_account(name)
    if account is None:
        raise ConfigurationError(
            f"--tenant-user names the system user {name!r}, which does not exist: create it with `useradd --system {name}`, or use the "
            "number of a free user id"
        )
    user = SystemUser(name, *account, folder)
    if max(account) >= NO_USER:
        raise ConfigurationError(f"--tenant-user names the user id {name}: use a number below {NO_USER}")
    if 0 in account:
        raise ConfigurationError(
            f"--tenant-user must not give a tenant the user or group of root: {name!r} has the ids {account}"
        )
    return user


def _check_users(users: Mapping[str, SystemUser]) -> None:
    user_owners: dict[int, str] = {user_id(): "the gateway"} if users else {}
    for tenant, user in users.items():
        if user.uid in user_owners:
            raise ConfigurationError(
                f"--tenant-user assigns the user {user.name!r} to the tenant {tenant!r} and to {user_owners[user.uid]}: each needs its own user"
            )
        user_owners[user.uid] = f"the tenant {tenant!r}"
    if users and (right := missing_right()):
        raise ConfigurationError(
            f"--tenant-user starts executors as other system users, but the gateway {right}. Run `djinn serve` as root, or remove the option"
        )


def _check_reachable(user: SystemUser, shared: Sequence[Path]) -> None:
    """Check that a user can run this Python and enter its own folder, the shared folders and the temporary folder.

    Raises:
        StartupError: the user cannot reach a file or folder.
    """
    python = Path(sys.executable)
    entered_folders = [folder / "any" for folder in (Path(tempfile.gettempdir()), *shared) if folder.exists()]
    paths = [user.folder, python, python.resolve(), *entered_folders]
    for path in paths:
        for parent in path.absolute().parents:
            status = parent.stat()
            is_allowed = (
                mode_of(status) & stat.S_IXOTH
                or (mode_of(status) & stat.S_IXUSR and status.st_uid == user.uid)
                or (mode_of(status) & stat.S_IXGRP and status.st_gid == user.gid)
            )
            if not is_allowed:
                raise StartupError(
                    f"the system user {user.name} cannot reach {path}, because it may not enter {parent}: move it to a folder that other "
                    f"users may enter, or run `chmod o+x {parent}`"
                )
