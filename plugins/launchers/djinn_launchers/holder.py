"""Holder of an executor: the parent of an executor process on the machine that an engine has chosen.

An engine runs the holder in a separate process (an actor, a task, a container) and forwards method calls from the process
that launched the executor. Arguments and results are strings, bytes and numbers, so no engine unpickles data. This module
does not import PyTorch.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Collection
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import attrs
import msgspec

from djinn_core.errors import DjinnError, StartupError
from djinn_core.hookspecs.transports import TlsOptions
from djinn_core.logs import get_logger
from djinn_core.protocol.addresses import address_towards
from djinn_core.protocol.net.tls_contexts import fingerprint_of_file
from djinn_core.registry.version import djinn_version
from djinn_core.system.files import CLOEXEC, user_id
from djinn_core.system.processes import lock_file
from djinn_launchers.fork_server_client import ForkServerClient
from djinn_server.launch.executor_config import ExecutorConfig, NetworkConfig, StoreConfig, decode_config
from djinn_server.launch.listen_addresses import ListenAddresses
from djinn_server.launch.orders import read_order
from djinn_server.launch.own_journals import JOURNAL_BYTES, MIN_BYTES, journal_space
from djinn_server.launch.process import ExecutorProcess
from djinn_server.launch.self_signed import self_signed
from djinn_server.launch.tickets import Badge
from djinn_server.system.private_files import make_private_folder

_ABANDONED_SECONDS: Final = 86_400.0
_LOCK: Final = "in-use"
# Made at the import: msgspec crashes where two threads have it inspect a class for the first time together.
_badges: msgspec.json.Decoder[Badge] = msgspec.json.Decoder(Badge)
_log = get_logger("djinn.launch")


class ExecutorHolder:
    """Parent of an executor process that serves clients on other machines.

    The holder owns a folder for certificate and journals. Methods may be called from several threads.

    Attributes:
        fingerprint: fingerprint of the executor's certificate.
    """

    def __init__(
        self,
        config: bytes,
        name: str,
        towards: str,
        base: str = "",
        share: int = 1,
        threads: int = 0,
        without: Collection[str] = (),
        prepared_seconds: float = 0.0,
    ) -> None:
        """Start the executor process and return at once.

        Args:
            config: encoded configuration of the executor (`ExecutorConfig.encode`).
            name: name of the executor's folder. Only replacements of the executor use the same name.
            towards: address of another machine. The executor listens with TLS at this machine's address on the route to
                that machine.
            base: folder for journals that machines share, so that sessions outlive this machine. If it is empty, journals
                are in this machine's temporary directory.
            share: number of executors that share the disk.
            threads: torch threads if `config` sets none. 0 stands for torch's default.
            without: names of environment variables that the executor must not inherit.
            prepared_seconds: seconds for which this machine keeps an idle fork server. If 0, it starts none.

        Raises:
            StartupError: the process cannot be started.
        """
        self.fingerprint = ""
        self._locks: list[int] = []  # descriptors
        read = decode_config(config)
        try:
            local = Path(tempfile.gettempdir()) / f"djinn-launched-{user_id()}"
            self._folder = _own_folder(local, name, self._locks)
            _remove_abandoned(local)
            self._journals = _own_folder(Path(base), name, self._locks) if base else self._folder
            self._host = host = address_towards(towards)
            tls = self._identity(host)
            plugins = ExecutorConfig(plugins=read.plugins).encode()
            fork_server = ForkServerClient(local, prepared_seconds, plugins) if prepared_seconds else None
            self._process = ExecutorProcess(self._adapted(read, host, tls, share, threads), without, fork_server)
        except (OSError, DjinnError) as error:
            self._unlock()
            if isinstance(error, StartupError):
                raise
            raise StartupError(
                f"the machine {socket.gethostname()} has no folder or no address for an executor: {error}"
            ) from error

    def version(self) -> str:
        """Return the version of Djinn on this machine."""
        return djinn_version()

    def issue_ticket(self, client: str, lifetime: float, badge: bytes) -> str:
        """Return a ticket for one connection to the executor.

        Args:
            client: name of the client.
            lifetime: seconds until the ticket expires, by the clock of this machine.
            badge: the client's `Badge` as JSON.
        """
        return self._process.issue_ticket(client, lifetime, _badges.decode(badge))

    def status(self, timeout: float) -> bytes:
        """Return the executor's `Sessions` report as JSON.

        Raises:
            StartupError: the executor does not answer in `timeout` seconds.
        """
        return msgspec.json.encode(self._process.status(timeout))

    def full(self) -> str:
        """Return why the executor refuses clients, or an empty string if it accepts them (`ExecutorProcess.full`)."""
        return self._process.full()

    def send(self, order: bytes) -> None:
        """Send an order to the executor (`ExecutorProcess.send`). `order`: the order as a line of JSON."""
        self._process.send(read_order(order))

    def wait(self) -> tuple[int, str]:
        """Wait until the executor has ended. Return its exit status, and how it ended in words (`ExecutorProcess.ending`)."""
        status = self._process.wait()
        return status, self._process.ending()

    def wait_ready(self, timeout: float) -> tuple[bytes, str, str]:
        """Wait until the executor listens. Return its `Ready` report as JSON, its fingerprint and the name of this host.

        The report has only addresses that other machines can reach.

        Raises:
            StartupError: the executor ends or is not ready in `timeout` seconds, or no transport listens for other machines.
        """
        ready = self._process.wait_ready(timeout)
        urls = tuple(url for url in ready.urls if urlsplit(url).hostname == self._host)
        if not urls:
            self._process.close(0.0)
            raise StartupError(
                f"the executor on {socket.gethostname()} has no address for other machines: install a transport plugin with TLS there, such as "
                "djinn-tcp"
            )
        return msgspec.json.encode(msgspec.structs.replace(ready, urls=urls)), self.fingerprint, socket.gethostname()

    def close(self, drain_seconds: float, for_good: bool) -> None:
        """End the executor.

        Args:
            drain_seconds: seconds for which its sessions may finish their work.
            for_good: True to remove its journals, because no executor will replace it.
        """
        self._process.close(drain_seconds)
        self._unlock()
        if for_good:
            shutil.rmtree(self._folder, ignore_errors=True)
            shutil.rmtree(self._journals, ignore_errors=True)

    def _unlock(self) -> None:
        while self._locks:
            os.close(self._locks.pop())

    def _identity(self, host: str) -> TlsOptions:
        """Create a certificate for this executor at the address `host`. Its key remains in the executor's folder."""
        folder = self._folder / "tls"
        shutil.rmtree(folder, ignore_errors=True)  # the certificate of the replaced executor
        identity = self_signed(folder, (host,))
        self.fingerprint = fingerprint_of_file(identity.certificate)
        return TlsOptions(identity.certificate, identity.key)

    def _adapted(self, config: ExecutorConfig, host: str, tls: TlsOptions, share: int, threads: int) -> ExecutorConfig:
        """Return `config` with paths, addresses, thread count and journal limit for this machine."""
        journals, recovery = None, config.recovery
        room = journal_space(self._journals)
        if config.recoverable and room >= MIN_BYTES:
            journals = self._journals / "journals"
            journals.mkdir(mode=0o700, exist_ok=True)
        elif config.recoverable:
            _log.warning(
                "sessions will not outlive their executor, because the disk has no space for journals",
                folder=str(self._journals),
            )
        return attrs.evolve(
            config,
            network=NetworkConfig(ListenAddresses(host), tls),
            threads=config.threads or threads or None,
            store=StoreConfig(None),
            accounts=None,
            state=self._journals,
            recovery=attrs.evolve(
                recovery,
                journals=journals,
                journal_limit=min(recovery.journal_limit, JOURNAL_BYTES, room // max(1, share)),
                keeps_journals_if_orphaned=True,
            ),
        )


def _own_folder(base: Path, name: str, locks: list[int]) -> Path:
    """Create the folder `base / name` and lock it for this process. Append the descriptor of the lock to `locks`.

    Raises:
        OSError: the folder cannot be created, other users have access to `base`, or another process has locked the folder.
    """
    make_private_folder(base)
    folder = base / name
    folder.mkdir(mode=0o700, exist_ok=True)
    # A separate file, because network file systems lock only files that are open for writing.
    locks.append(os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | CLOEXEC, 0o600))
    lock_file(locks[-1])
    return folder


def _remove_abandoned(base: Path) -> None:
    """Remove the folders in `base` that no process has locked and that have not changed for `_ABANDONED_SECONDS`."""
    for folder in base.iterdir():
        with contextlib.suppress(OSError):  # a process has locked it, or it has just been removed
            newest = max(path.stat().st_mtime for path in (folder, *folder.rglob("*")))
            if time.time() - newest < _ABANDONED_SECONDS:
                continue
            lock = os.open(folder / _LOCK, os.O_RDWR | CLOEXEC)
            try:
                lock_file(lock)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
