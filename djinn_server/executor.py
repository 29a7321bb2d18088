"""The executor process: it serves sessions on one device.

A parent (`djinn_server.launch`) starts the process, configures it over pipes, and ends it. The process never registers
the device `remote_accelerator`.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import secrets
import shutil
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

import attrs
import msgspec
import torch

from djinn_core import logs
from djinn_core.errors import DjinnError, ProtocolError, QuotaExceeded, SessionLost, TransportError
from djinn_core.hookspecs.session_channel import SessionChannel
from djinn_core.hookspecs.transports import Connection, Limits, Listener
from djinn_core.ir.operators import operators_digest
from djinn_core.protocol.addresses import SOCKET_NAME, transport_for
from djinn_core.protocol.net.parallel_groups import ParallelGroups
from djinn_core.registry.builtin_plugins import builtin_plugins
from djinn_core.registry.kinds import EXECUTOR_KINDS
from djinn_core.registry.registry import Registry, load_registry
from djinn_core.system.private_directories import remove_abandoned
from djinn_core.system.role import become_server
from djinn_core.wire.executor_reports import Ready, Sessions
from djinn_core.wire.message_base import Message
from djinn_core.wire.messages import Attached
from djinn_core.wire.resume_messages import ControlAttach, ParallelAttach, Resume, Resumed
from djinn_server.admission_limits import ExecutorLimits
from djinn_server.attach import AdmittedClient, admit, attached
from djinn_server.context import ExecutorContext
from djinn_server.control import Control
from djinn_server.custom_operators import CustomOperators
from djinn_server.devices import FALLBACK, OpenDevice, limited, open_device
from djinn_server.disk_quota import DiskQuota
from djinn_server.events import ServerEvents
from djinn_server.executor_metrics import metered
from djinn_server.handshake import complain, instance, refuse, send_message
from djinn_server.hookspecs.authenticators import Denial
from djinn_server.launch.executor_config import ExecutorConfig, ModelConfig, StoreConfig
from djinn_server.launch.listen_addresses import faster_transports, listening_transports
from djinn_server.launch.orders import FULL_SECONDS, Failed, Full, Report, Start
from djinn_server.launch.system_users import SystemUser
from djinn_server.launch.tickets import Badge, TicketChecker
from djinn_server.malloc_trim import keep_few_arenas, keep_freed_for_next_run, set_start_aside
from djinn_server.peers.exchange import PeerListener, serve_control_channel
from djinn_server.peers.inbox import PeerConnection
from djinn_server.recovery.executor_channel import ExecutorChannel, PlainExecutorChannel
from djinn_server.recovery.leases import CrashLoop, Leases
from djinn_server.recovery.log_records import SessionIdentity
from djinn_server.rlimits import confine
from djinn_server.run_strategies import begin_strategies, compilers_of, strategies_of
from djinn_server.session import ExecutorSession
from djinn_server.session_pauses import Pause, Wakeup
from djinn_server.session_registry import ServedSession, SessionEntry, SessionRegistry
from djinn_server.shared_device import SharedDevice
from djinn_server.system.confinement import confine_process
from djinn_server.tenancy import Tenancy
from djinn_server.weights.store import WeightStore
from djinn_server.weights.weight_reader import WeightReader

SessionFactory = Callable[[ExecutorContext, WeightStore | None, PeerListener], ServedSession]
_TELLING_SECONDS = 0.2  # for which clients may read the reason why their sessions end
_LAST_EVENTS_SECONDS = 1.5  # less than its parent waits for it
_log = logs.get_logger("djinn.server")


class Executor:
    """Admit clients with valid tickets, and run a session on the device for each."""

    def __init__(
        self,
        device: OpenDevice,
        context: ExecutorContext,
        registry: Registry,
        tickets: TicketChecker,
        new: SessionFactory,
        config: ExecutorConfig = ExecutorConfig(),  # noqa: B008 - a value
        store: WeightStore | None = None,
        operators: CustomOperators | None = None,
    ) -> None:
        self._device = device
        self._operators = operators or CustomOperators((), ())
        self._device_id = device.capabilities.id
        self._context = context
        self._config = config
        self._leases = Leases(config.recovery, context.usage, context.disk)
        self._tenancy = Tenancy(context.usage, context.disk, store, config.accounts, self._for_tenant(config.models))
        self._registry = registry
        self._tickets = tickets
        self._new_session = new
        self._roster = SessionRegistry()
        self._parallel = ParallelGroups()
        tls = None if config.network is None else config.network.tls
        self._peer_listener = PeerListener(registry.transports, tls, self._leases.patience)
        self._listeners: list[Listener] = []
        self._limits = ExecutorLimits(context.usage, config.admission, self._leases.next_lease_end)
        self._full_at = 0.0
        self.tell: Callable[[Report], None] = lambda _: None
        self._accepting = True
        self._door = threading.Lock()
        self._inside = 0  # sessions, including sessions under construction

    def listen(self, directory: str) -> tuple[str, ...]:
        """Listen at a socket in `directory`, and with all configured transports. Return the URLs.

        An executor that a program owns also listens with faster transports for this host.

        Raises:
            TransportError: an address cannot be bound.
            PluginError: there is no local transport.
        """
        own = f"unix://{directory}/{SOCKET_NAME}"
        transports, network = self._registry.transports, self._config.network
        local = transport_for(own, transports)
        self._listeners.append(local.listen(own, Limits(), self.serve))
        unnamed: list[Listener] = []
        for one in (
            faster_transports(transports, local)
            if network is None
            else listening_transports(transports, network.tls, network.listen_at)
        ):
            capabilities = one.transport.capabilities
            if not capabilities.relayed and one.transport is not local:
                self._listeners.append(one.transport.listen(one.url(0), Limits(), self.serve))
                if capabilities.named_only or capabilities.same_host:
                    unnamed.append(self._listeners[-1])
        # Transports that users have to name are left out: users do not choose how executors connect. Other host-local
        # transports are left out too: `ConnectPeer` accepts only sockets of executors.
        self._peer_listener.urls = tuple(listener.url for listener in self._listeners if listener not in unnamed)
        return tuple(listener.url for listener in self._listeners)

    def serve(self, connection: Connection) -> bool:
        """Serve a connection, beginning with its first message. Return True if a session has taken it over."""
        admitted = admit(connection, self._tickets, self._peer_listener, self._context)
        if isinstance(admitted, Resume):
            return self._resume(connection, admitted)
        if isinstance(admitted, AdmittedClient):
            return self._serve_client(connection, admitted)
        if isinstance(admitted, PeerConnection):
            _serve_peer(admitted, connection)
        elif isinstance(admitted, ControlAttach):
            self._serve_control_channel(connection, admitted)
        elif isinstance(admitted, ParallelAttach):
            self._attend_parallel(connection, admitted)
        return False

    def _serve_client(self, connection: Connection, admitted: AdmittedClient) -> bool:
        """Start the session of a new client. Return the result of `serve`."""
        if not self._accepting:
            refuse(connection, "the executor is shutting down: connect again later")
            return False
        badge = admitted.grant.badge
        with self._door:  # one at a time, so that simultaneous clients do not all get the last place
            self._tenancy.assign(badge)
            denial = self._denial(badge)
            if denial is not None and denial.kind == "full":
                self.full(denial.reason)
            self._inside += denial is None
        if denial is None:
            return self._start(partial(self._begin, connection, admitted))
        who = {"tenant": badge.tenant, "key": badge.token, "client": admitted.grant.client}
        self._context.events.emit("session_refused", why=denial.kind, **who)
        refuse(connection, denial.reason, retry=denial.retry, retry_after=denial.retry_after)
        return False

    def _denial(self, badge: Badge) -> Denial | None:
        """Return the denial for a client that may not begin a session now; None if it may."""
        reason = self._tenancy.refusal(badge)
        if reason:
            return Denial(reason, "tenant")
        return self._limits.denial(self._inside, self._context.device.turns.longest_wait)

    def _start(self, begin: Callable[[], tuple[Iterator[Pause], Wakeup]]) -> bool:
        """Run the session that `begin` creates, in the threads of the executor. Return the result of `serve`."""
        try:
            pauses, wakeup = begin()
        except BaseException:
            self._left()
            raise
        self._context.threads.run(pauses, wakeup)
        return True

    def _begin(self, connection: Connection, admitted: AdmittedClient) -> tuple[Iterator[Pause], Wakeup]:
        """Create the session of a new client."""
        grant = admitted.grant
        owner = SessionIdentity(secrets.token_hex(16), grant.client, secrets.token_urlsafe(32), grant.badge)
        leased = self._leases.lease(owner, connection) if self._leases.seconds else None
        talk = leased or PlainExecutorChannel(connection)
        return self._make_session(owner, talk, connection, self._attached(owner, admitted))

    def _resume(self, connection: Connection, asked: Resume) -> bool:
        """Resume a session of this executor or of an earlier process. Return the result of `serve`."""
        try:
            recovered = self._leases.recover(connection, asked, self._assign_recovered)
        except (QuotaExceeded, BlockingIOError) as error:  # the previous executor may still be ending
            _log.warning("cannot recover a session yet", session=asked.session, reason=str(error))
            reason = str(error) if isinstance(error, QuotaExceeded) else "another executor still has the session"
            refuse(connection, reason, retry=True)
            return False
        except (SessionLost, OSError) as error:
            _log.error("a session cannot be recovered", session=asked.session, error=str(error))
            self._context.usage.count("recovery_failures")
            crashes_executors = isinstance(error, CrashLoop)
            refuse(connection, f"the session cannot be recovered: {error}", crashes_executors=crashes_executors)
            return False
        if recovered is None:
            resumed = lambda: self._context.events.emit("session_resumed", session=asked.session)  # noqa: E731 - of this one
            self._parallel.accept_for(connection, asked.session)
            return self._leases.serve(connection, asked, resumed)
        owner, leased, received = recovered
        _log.warning("recovering a session: its journal is replayed", session=owner.session, frames=received)
        self._context.usage.count("sessions_recovered")
        self._context.usage.count("replayed_frames", received)
        with self._door:
            self._inside += 1
        return self._start(partial(self._make_session, owner, leased, connection, Resumed(received, instance())))

    def _assign_recovered(self, badge: Badge) -> str:
        """Assign the executor to the tenant of a session that is to be recovered.

        Return "" on success, else the reason why this is not possible now.
        """
        reason = self._tenancy.refusal_to_recover(badge)
        if reason:
            return reason
        self._tenancy.assign(badge)
        return self._tenancy.refusal(badge) or self._context.usage.may_begin(self._inside)

    def _left(self) -> None:
        with self._door:
            self._inside -= 1
        self._report_space()  # not before: the gateway sends the next client at once

    def _serve_control_channel(self, connection: Connection, asked: ControlAttach) -> None:
        """Serve a control channel of a client. A wrong secret gets the same reply as an unknown session."""
        session = self._roster.session(asked.session)
        if not self._leases.knows(asked.session, asked.secret) or not isinstance(session, ExecutorSession):
            refuse(connection, "there is no such session (any more)")
            return
        serve_control_channel(connection, session.exchange)

    def _attend_parallel(self, connection: Connection, asked: ParallelAttach) -> None:
        """Use a further connection for large buffers of a session, until it ends.

        A wrong secret is treated like an unknown session.
        """
        refused = "there is no such session (any more)"
        if self._leases.knows(asked.session, asked.secret):
            welcome = partial(send_message, connection, Resumed(0))
            refused = self._parallel.serve(connection, asked.session, asked.group, welcome)
        if refused:
            refuse(connection, refused)

    def _make_session(
        self, owner: SessionIdentity, talk: ExecutorChannel, connection: Connection, greeting: Message
    ) -> tuple[Iterator[Pause], Wakeup]:
        events = self._context.events.bound(session=owner.session, **self._client(owner.badge, owner.client))
        context = attrs.evolve(self._context, events=events)
        session = self._new_session(context, self._tenancy.store, self._peer_listener)
        return self._converse(session, events, owner, talk, connection, greeting), session.wakeup

    def _converse(
        self,
        session: ServedSession,
        events: ServerEvents,
        owner: SessionIdentity,
        talk: ExecutorChannel,
        connection: Connection,
        greeting: Message,
    ) -> Iterator[Pause]:
        """Run a session from start to end, with its log lines and metrics."""
        name, client = owner.session, owner.client
        events.emit("session_began", recovered=isinstance(greeting, Resumed))
        began = time.monotonic()
        with ExitStack() as ending:  # in reverse order, each of them even if another one fails
            ending.callback(talk.close)
            ending.callback(self._context.trimmer.soon)
            ending.callback(self._left)
            ending.callback(session.close)
            ending.callback(self._leases.end, name)
            ending.callback(lambda: events.emit("session_ended", duration=time.monotonic() - began))
            with (
                self._roster.enter(SessionEntry(name, client, session, owner.badge.token, talk)),
                _log_session(talk, name, client, partial(self._context.usage.count_as, "sessions_closed"), self._check),
            ):
                self._parallel.accept_for(connection, name)
                send_message(connection, greeting)
                talk.resend()
                yield from session.pauses(talk)

    def _attached(self, owner: SessionIdentity, admitted: AdmittedClient) -> Attached:
        caches_weights, leases = self._tenancy.store is not None, self._leases
        reply = attached(
            owner.session,
            os.getpid(),
            self._device.info(),
            admitted.operators,
            caches_weights=caches_weights,
            weight_sources=self._context.weights.schemes,
            custom_operators=self._operators.offered,
        )
        if not leases.seconds:
            return reply
        return msgspec.structs.replace(reply, lease=leases.seconds, secret=owner.secret, recoverable=leases.recoverable)

    def _for_tenant(self, models: ModelConfig) -> Sequence[Callable[[str], None]]:
        """Return the functions that set up a tenant's custom ops and weight folders."""
        callbacks: list[Callable[[str], None]] = [self._operators.assign, self._leases.assign_tenant]
        weights, disk = self._context.weights, self._context.disk
        if models.saving is not None:
            callbacks.append(partial(weights.save_in, models.saving, disk))
        if models.published is not None:
            callbacks.append(partial(weights.publish_in, models.published, disk))
        return callbacks

    def _client(self, badge: Badge, client: str) -> dict[str, str]:
        """Return the facts about a client for observers."""
        return {"tenant": badge.tenant, "key": badge.token, "client": client, "device": self._device_id}

    def when_device_is_lost(self, lost: Callable[[str], None]) -> None:
        """After the loss of the device, tell the clients whose sessions end, then call `lost` with the reason."""

        def end(reason: str) -> None:
            ending = [entry.connection for entry in self._roster.entries() if not _outlives(entry.connection)]
            threads = [
                threading.Thread(target=_part, args=(channel, reason), daemon=True)
                for channel in ending
                if channel is not None
            ]
            for thread in threads:
                thread.start()
            deadline = time.monotonic() + _TELLING_SECONDS
            for thread in threads:
                thread.join(max(0.0, deadline - time.monotonic()))
            lost(reason)

        if self._context.device.watch is not None:
            self._context.device.watch.start(end)

    def _check(self, error: Exception) -> None:
        if self._context.device.watch is not None:
            self._context.device.watch.check(error)

    def sessions(self, number: int) -> Sessions:
        """Return a report of the running sessions, with metrics."""
        tokens = self._roster.tokens()
        holdings = self._context.usage.holdings()
        figures = metered(self._context, self._tenancy.store, self._leases, holdings)
        models = tuple([times.figures(name) for name, times in self._context.usage.models().items()])
        return Sessions(
            number, self._device.info(), self._roster.statuses(holdings), figures, tokens, models, logs.recent.lines()
        )

    def evict(self, tokens: Collection[str]) -> None:
        """End the sessions of clients that were admitted with one of these tokens (their ids)."""
        for entry in self._roster.of_tokens(tokens):
            self._context.usage.count_as("sessions_closed", "token")
            _log.warning("ending a session: its token is invalid now", session=entry.id, client=entry.client)
            if entry.connection is not None:
                _part(
                    entry.connection, "the token that you came with has been revoked or has expired: ask for a new one"
                )
                entry.connection.close()

    def end(self, session: str, reason: str) -> None:
        """End a session and its running submission."""
        entry = self._roster.entry(session)
        if entry is None or entry.connection is None:
            return
        _log.warning("ending a session on request", session=entry.id, client=entry.client, reason=reason)
        self._context.usage.count_as("sessions_closed", "killed")
        entry.session.stop()
        _part(entry.connection, reason)
        entry.connection.close()

    def full(self, reason: str) -> None:
        """Report to the gateway that this executor is full. The gateway refuses clients for `FULL_SECONDS`."""
        if time.monotonic() - self._full_at > FULL_SECONDS / 2:
            self._full_at = time.monotonic()
            self.tell(Full(reason))

    def _report_space(self) -> None:
        """Report that the executor has room again, after a session has ended."""
        if self._full_at:
            self._full_at = 0.0
            self.tell(Full(""))

    def assign_tenant(self, tenant: str) -> None:
        """Assign the executor to a tenant."""
        self._tenancy.assign_tenant(tenant)

    def tick(self) -> None:
        """Do periodic work. Called at least once a second."""
        self._context.usage.account.tick(self._context.device.turns.running_seconds())
        self._leases.tick()

    @property
    def idle(self) -> bool:
        """Return True if there are no sessions."""
        return self._roster.empty

    def stop_accepting(self) -> None:
        """Admit no further clients. Calling it again does nothing."""
        self._accepting = False
        if not self._config.recovery.keeps_journals_if_stopped:
            self._leases.expire()
        while self._listeners:
            self._listeners.pop().close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop_accepting()
        for entry in self._roster.entries():
            if entry.connection is not None:
                _part(entry.connection, "the server was stopped", stopped=True)
                entry.connection.close()
        self.close_observers()

    def close_observers(self) -> None:
        """Deliver the last events to observers of plugins."""
        self._context.events.close(_LAST_EVENTS_SECONDS)


def _serve_peer(peer: PeerConnection, connection: Connection) -> None:
    try:
        peer.serve(connection)
    except TransportError as error:
        _log.debug("another executor closed its connection", source=peer.source, error=str(error))
    except ProtocolError as error:
        _log.warning("closed another executor's connection after a protocol error", error=str(error))
        complain(connection, str(error))


@contextmanager
def _log_session(
    connection: SessionChannel,
    name: str,
    client: str,
    closed: Callable[[str], None],
    check: Callable[[Exception], None],
) -> Iterator[None]:
    """Log start and end of the session that runs in the block. An error ends only the session's connection.

    `closed`: called with the reason if this end closes the session. `check`: called with internal errors of the executor.
    """
    log = _log.bind(session=name)
    log.info("session began", client=client)
    try:
        with logs.in_context(session=name):
            yield
    except ProtocolError as error:
        closed("protocol")
        log.warning("session closed: the client sent an invalid message", error=str(error))
        _part(connection, str(error))
    except QuotaExceeded as error:
        closed("quota")
        log.warning("session closed: the tenant's quota is exhausted", reason=str(error))
        _part(connection, f"the server ended this session: {error}")
    except SessionLost as error:
        closed("recovery")
        log.error("a session cannot be recovered", error=str(error))
        _part(connection, f"the session cannot be recovered: {error}")
    except TransportError as error:
        log.info("session ended with its connection", error=str(error))
    except Exception as error:
        check(error)
        closed("error")
        log.exception("session ended by an internal error of the executor", error=repr(error))
        _part(connection, f"the executor failed: {error!r}; its log has the details")
    else:
        log.info("session ended")


def _outlives(connection: SessionChannel | None) -> bool:
    """Return True if another process can recover the session of this channel."""
    return isinstance(connection, ExecutorChannel) and connection.journal.open


def _part(connection: SessionChannel, reason: str, *, stopped: bool = False) -> None:
    """Tell the client why its session ends, if it is still connected. `stopped`: as in `Broken`."""
    connection.expire()
    if isinstance(connection, ExecutorChannel):
        connection.abandon_replay()
    complain(connection, reason, stopped=stopped)


def run(device: str, reports: int, new: SessionFactory = ExecutorSession) -> int:
    """Run an executor until its end, and return the exit status.

    Args:
        device: name of the device; empty: the best device.
        reports: file descriptor for reports. Orders arrive on standard input.
        new: factory of sessions on the device.
    """
    become_server("executor")
    keep_few_arenas()
    keep_freed_for_next_run()
    if sys.stderr is not None:
        faulthandler.enable(all_threads=False)  # otherwise a crashing kernel leaves only a signal
    control = Control(_take_standard_input(), reports)
    control.catch_signals()
    start = control.read_start()
    try:
        logs.show(start.config.log.level)
        logs.recent.install()
        logs.set_debug_level(start.config.log.debug)
        opened = _open(device, start, new)
        start = start.without_secrets()
        with opened as executor:
            executor.tell = control.report
            executor.when_device_is_lost(partial(_end_at_once, control, start.directory))
            operators_digest()  # takes 0.06 s; the first client would wait for it
            urls = executor.listen(start.directory)
            control.report(Ready(urls, os.getpid(), executor.sessions(0).device, str(torch.__version__)))
            _log.info("executor is ready", urls=urls, process=os.getpid())
            remove_abandoned(Path(start.directory).parent)
            set_start_aside()
            control.run(executor, start.config.unused_seconds)
            recovery = start.config.recovery
            if recovery.keeps_journals_if_stopped or (control.orphaned and recovery.keeps_journals_if_orphaned):
                executor.close_observers()
                _end_at_once(control, start.directory, "its parent ended or stopped it")
    except Exception as error:
        expected = isinstance(error, DjinnError)
        if not expected:
            _log.exception("executor failed", error=repr(error))
        control.report(Failed(str(error) if expected else f"the executor failed: {error!r}; its log has the details"))
        return 1
    finally:
        shutil.rmtree(start.directory, ignore_errors=True)
    _log.info("executor ends", process=os.getpid())
    return 0


def _end_at_once(control: Control, directory: str, reason: str) -> None:
    """End this process without a message to clients. Journals stay for the next process."""
    control.report(Failed(reason))
    shutil.rmtree(directory, ignore_errors=True)
    os._exit(1)


def _open(device: str, start: Start, new: SessionFactory) -> Executor:
    config = start.config
    if config.user is not None:
        _make_folders(config, config.user)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    registry = load_plugins(config)
    operators = CustomOperators(config.operators, registry.operators, tenants=config.tenants)
    disk = DiskQuota()
    strategies, compilers = strategies_of(registry, config), compilers_of(registry, config)
    found, evicts = open_device(registry.devices, device), not any(strategy.joins_sessions for strategy in strategies)
    opened = limited(found, config.memory.limit, disk, on_demand=evicts, idle=config.memory.idle_minutes > 0)
    if config.hang_seconds is not None:
        opened.runtime.hang_seconds = config.hang_seconds
    events = ServerEvents("executor")
    events.observe_with(registry)
    weights = WeightReader(registry.weight_sources, config.permissions, registry.weight_formats)
    context = ExecutorContext(
        SharedDevice(opened.runtime, registry.operators),
        weights=weights,
        disk=disk,
        events=events,
        idle_seconds=config.memory.idle_minutes * 60,
        ahead_bytes=config.memory.ahead,
    )
    if opened.capabilities.kind == FALLBACK:
        confine(opened.capabilities.memory)
    begin_strategies(context, strategies, compilers)
    store = _open_store(config.store, disk)
    key, config = TicketChecker(start.key), start.without_secrets().config
    return Executor(opened, context, registry, key, new, config, store, operators)


def _make_folders(config: ExecutorConfig, user: SystemUser) -> None:
    """Make the private folders of an executor that runs as its tenant's system user."""
    user.make_subfolders()
    for folder in (config.recovery.journals, config.accounts):
        if folder is not None:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)


def load_plugins(config: ExecutorConfig) -> Registry:
    """Load the plugins that an executor uses, and return them.

    Raises:
        PluginError: a requested plugin cannot be used.
    """
    return load_registry(config.plugins, builtins=builtin_plugins(), kinds=EXECUTOR_KINDS, started=True)


def _open_store(config: StoreConfig, disk: DiskQuota) -> WeightStore | None:
    if config.directory is None:
        return None
    try:
        return WeightStore(config.directory, config.limit, disk)
    except OSError as error:
        _log.warning("the weight store is off: cannot use its directory", error=str(error))
        return None


def _take_standard_input() -> int:
    """Move the pipe with the parent's orders to another descriptor and return it. Other output goes to the log."""
    orders = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return orders


def main(arguments: Sequence[str] | None = None, new: SessionFactory = ExecutorSession) -> None:
    """Run an executor and end the process, without waiting for threads that may run an op."""
    parser = argparse.ArgumentParser(prog="djinn executor", description="Started by djinn itself.")
    parser.add_argument("--device", default="")
    parser.add_argument("--report-fd", type=int, required=True)
    parser.add_argument("--confined", action="store_true")
    options = parser.parse_args(arguments)
    try:
        if options.confined:
            confine_process()
        status = run(options.device, options.report_fd, new)
    except DjinnError as error:
        sys.stderr.write(f"{error}\n")
        status = 2
    with suppress(OSError):  # the gateway that logs it was killed
        sys.stderr.flush()
    os._exit(status)
