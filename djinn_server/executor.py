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
from djinn_server.devices import FALLBACK, OpenDevice, open_device, with_eviction
from djinn_server.disk_quota import DiskQuota
from djinn_server.events import ServerEvents
from djinn_server.executor_metrics import collect_metrics
from djinn_server.handshake import complain, instance, refuse, send_message
from djinn_server.hookspecs.authenticators import Denial
from djinn_server.launch.executor_config import ExecutorConfig, ModelConfig, StoreConfig
from djinn_server.launch.listen_addresses import faster_transports, listening_transports
from djinn_server.launch.orders import FULL_SECONDS, Failed, Full, Report, Start
from djinn_server.launch.system_users import SystemUser
from djinn_server.launch.tickets import Badge, TicketChecker
from djinn_server.malloc_trim import freeze_startup_objects, keep_few_arenas, keep_freed_for_next_run
from djinn_server.peers.exchange import PeerListener, serve_control_channel
from djinn_server.peers.inbox import PeerConnection
from djinn_server.recovery.executor_channel import ExecutorChannel, PlainExecutorChannel
from djinn_server.recovery.leases import CrashLoop, Leases
from djinn_server.recovery.log_records import SessionIdentity
from djinn_server.rlimits import limit_memory
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
_NOTIFY_SECONDS = 0.2  # to send clients the reason why their sessions end
_LAST_EVENTS_SECONDS = 1.5  # to deliver the last events to observers; the parent waits longer for this process
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
        self._tenancy = Tenancy(context.usage, context.disk, store, config.accounts, self._callbacks_for(config.models))
        self._registry = registry
        self._tickets = tickets
        self._new_session = new
        self._roster = SessionRegistry()
        self._parallel = ParallelGroups()
        tls = None if config.network is None else config.network.tls
        self._peer_listener = PeerListener(registry.transports, tls, self._leases.patience)
        self._listeners: list[Listener] = []
        self._limits = ExecutorLimits(context.usage, config.admission, self._leases.next_lease_end)
        self._reported_full_at = 0.0
        self.send_report: Callable[[Report], None] = lambda _: None
        self._accepting = True
        self._admission_lock = threading.Lock()
        self._session_count = 0  # including sessions under construction

    def listen(self, directory: str) -> tuple[str, ...]:
        """Listen at a Unix socket in `directory`, and with all configured transports. Return the URLs.

        An executor that a client's program started also listens with faster transports for this host.

        Raises:
            TransportError: an address cannot be bound.
            PluginError: there is no local transport.
        """
        socket_url = f"unix://{directory}/{SOCKET_NAME}"
        transports, network = self._registry.transports, self._config.network
        local = transport_for(socket_url, transports)
        self._listeners.append(local.listen(socket_url, Limits(), self.serve))
        unnamed: list[Listener] = []
        for listening in (
            faster_transports(transports, local)
            if network is None
            else listening_transports(transports, network.tls, network.listen_at)
        ):
            capabilities = listening.transport.capabilities
            if not capabilities.relayed and listening.transport is not local:
                self._listeners.append(listening.transport.listen(listening.url(0), Limits(), self.serve))
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
        """Start the session of a new client, or refuse the client. Return True if the session started."""
        if not self._accepting:
            refuse(connection, "the executor is shutting down: connect again later")
            return False
        badge = admitted.grant.badge
        with self._admission_lock:  # one client at a time, so that two cannot both begin the last session
            self._tenancy.assign(badge)
            denial = self._denial(badge)
            if denial is not None and denial.kind == "full":
                self.report_full(denial.reason)
            self._session_count += denial is None
        if denial is None:
            return self._start(partial(self._begin, connection, admitted))
        client_facts = {"tenant": badge.tenant, "key": badge.token, "client": admitted.grant.client}
        self._context.events.emit("session_refused", why=denial.kind, **client_facts)
        refuse(connection, denial.reason, retry=denial.retry, retry_after=denial.retry_after)
        return False

    def _denial(self, badge: Badge) -> Denial | None:
        """Return the reason why a client may not begin a session now, or None if it may."""
        if reason := self._tenancy.refusal(badge):
            return Denial(reason, "tenant")
        return self._limits.denial(self._session_count, self._context.device.turns.longest_wait)

    def _start(self, begin: Callable[[], tuple[Iterator[Pause], Wakeup]]) -> bool:
        """Run the session that `begin` creates in the executor's threads. Return True: it takes over the connection."""
        try:
            pauses, wakeup = begin()
        except BaseException:
            self._end_session()
            raise
        self._context.threads.run(pauses, wakeup)
        return True

    def _begin(self, connection: Connection, admitted: AdmittedClient) -> tuple[Iterator[Pause], Wakeup]:
        """Create the session of a new client."""
        grant = admitted.grant
        owner = SessionIdentity(secrets.token_hex(16), grant.client, secrets.token_urlsafe(32), grant.badge)
        has_lease = self._leases.seconds > 0
        channel = self._leases.lease(owner, connection) if has_lease else PlainExecutorChannel(connection)
        return self._make_session(owner, channel, connection, self._attached(owner, admitted))

    def _resume(self, connection: Connection, request: Resume) -> bool:
        """Resume a session of this executor, or recover it from a journal. Return True if it takes the connection."""
        try:
            recovered = self._leases.recover(connection, request, self._assign_recovered)
        except (QuotaExceeded, BlockingIOError) as error:  # the previous executor may still be ending
            _log.warning("cannot recover a session yet", session=request.session, reason=str(error))
            reason = str(error) if isinstance(error, QuotaExceeded) else "another executor still has the session"
            refuse(connection, reason, retry=True)
            return False
        except (SessionLost, OSError) as error:
            _log.error("cannot recover a session", session=request.session, error=str(error))
            self._context.usage.count("recovery_failures")
            crashes_executors = isinstance(error, CrashLoop)
            refuse(connection, f"the session cannot be recovered: {error}", crashes_executors=crashes_executors)
            return False
        if recovered is None:
            self._parallel.accept_for(connection, request.session)
            notify = partial(self._context.events.emit, "session_resumed", session=request.session)
            return self._leases.serve(connection, request, notify)
        owner, channel, frames = recovered
        _log.warning("recovering a session: its journal is replayed", session=owner.session, frames=frames)
        self._context.usage.count("sessions_recovered")
        self._context.usage.count("replayed_frames", frames)
        with self._admission_lock:
            self._session_count += 1
        return self._start(partial(self._make_session, owner, channel, connection, Resumed(frames, instance())))

    def _assign_recovered(self, badge: Badge) -> str:
        """Assign the executor to the tenant of a session that is to be recovered.

        Return "" on success, else the reason why this is not possible now.
        """
        reason = self._tenancy.refusal_to_recover(badge)
        if reason:
            return reason
        self._tenancy.assign(badge)
        return self._tenancy.refusal(badge) or self._context.usage.may_begin(self._session_count)

    def _end_session(self) -> None:
        with self._admission_lock:
            self._session_count -= 1
        self._report_space()  # not before: the gateway sends the next client at once

    def _serve_control_channel(self, connection: Connection, request: ControlAttach) -> None:
        """Serve a control channel of a client. A wrong secret gets the same reply as an unknown session."""
        session = self._roster.session(request.session)
        if not self._leases.knows(request.session, request.secret) or not isinstance(session, ExecutorSession):
            refuse(connection, "there is no such session (any more)")
            return
        serve_control_channel(connection, session.exchange)

    def _attend_parallel(self, connection: Connection, request: ParallelAttach) -> None:
        """Serve an additional connection for large buffers of a session, until the connection ends.

        A wrong secret gets the same reply as an unknown session.
        """
        reason = "there is no such session (any more)"
        if self._leases.knows(request.session, request.secret):
            welcome = partial(send_message, connection, Resumed(0))
            reason = self._parallel.serve(connection, request.session, request.group, welcome)
        if reason:
            refuse(connection, reason)

    def _make_session(
        self, owner: SessionIdentity, channel: ExecutorChannel, connection: Connection, greeting: Message
    ) -> tuple[Iterator[Pause], Wakeup]:
        events = self._context.events.with_facts(session=owner.session, **self._client_facts(owner.badge, owner.client))
        context = attrs.evolve(self._context, events=events)
        session = self._new_session(context, self._tenancy.store, self._peer_listener)
        return self._serve_session(session, events, owner, channel, connection, greeting), session.wakeup

    def _serve_session(
        self,
        session: ServedSession,
        events: ServerEvents,
        owner: SessionIdentity,
        channel: ExecutorChannel,
        connection: Connection,
        greeting: Message,
    ) -> Iterator[Pause]:
        """Run a session from start to end. Log its start and end, and update metrics."""
        name, client = owner.session, owner.client
        events.emit("session_began", recovered=isinstance(greeting, Resumed))
        began = time.monotonic()
        with ExitStack() as ending:  # calls run in reverse order, each even if another call fails
            ending.callback(channel.close)
            ending.callback(self._context.trimmer.soon)
            ending.callback(self._end_session)
            ending.callback(session.close)
            ending.callback(self._leases.end, name)
            ending.callback(lambda: events.emit("session_ended", duration=time.monotonic() - began))
            with (
                self._roster.enter(SessionEntry(name, client, session, owner.badge.token, channel)),
                _log_session(
                    channel, name, client, partial(self._context.usage.count_as, "sessions_closed"), self._check_device
                ),
            ):
                self._parallel.accept_for(connection, name)
                send_message(connection, greeting)
                channel.resend()
                yield from session.pauses(channel)

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

    def _callbacks_for(self, models: ModelConfig) -> Sequence[Callable[[str], None]]:
        """Return functions that take a tenant's name, and set up the tenant's custom ops, leases and weight folders."""
        callbacks: list[Callable[[str], None]] = [self._operators.assign, self._leases.assign_tenant]
        weights, disk = self._context.weights, self._context.disk
        if models.saving is not None:
            callbacks.append(partial(weights.save_in, models.saving, disk))
        if models.published is not None:
            callbacks.append(partial(weights.publish_in, models.published, disk))
        return callbacks

    def _client_facts(self, badge: Badge, client: str) -> dict[str, str]:
        """Return the fields that describe a client in events."""
        return {"tenant": badge.tenant, "key": badge.token, "client": client, "device": self._device_id}

    def when_device_is_lost(self, end_process: Callable[[str], None]) -> None:
        """Watch the device. After its loss, notify clients whose sessions end, and call `end_process`."""

        def end(reason: str) -> None:
            ending = [entry.connection for entry in self._roster.entries() if not _is_recoverable(entry.connection)]
            threads = [
                threading.Thread(target=_notify_end, args=(channel, reason), daemon=True)
                for channel in ending
                if channel is not None
            ]
            for thread in threads:
                thread.start()
            deadline = time.monotonic() + _NOTIFY_SECONDS
            for thread in threads:
                thread.join(max(0.0, deadline - time.monotonic()))
            end_process(reason)

        if self._context.device.watch is not None:
            self._context.device.watch.start(end)

    def _check_device(self, error: Exception) -> None:
        if self._context.device.watch is not None:
            self._context.device.watch.check(error)

    def sessions(self, number: int) -> Sessions:
        """Return a report of the running sessions, with metrics."""
        tokens = self._roster.tokens()
        holdings = self._context.usage.holdings()
        figures = collect_metrics(self._context, self._tenancy.store, self._leases, holdings)
        models = tuple([times.figures(name) for name, times in self._context.usage.models().items()])
        return Sessions(
            number, self._device.info(), self._roster.statuses(holdings), figures, tokens, models, logs.recent.lines()
        )

    def evict(self, tokens: Collection[str]) -> None:
        """End the sessions of clients that were admitted with one of `tokens`, which are ids of tokens."""
        for entry in self._roster.of_tokens(tokens):
            self._context.usage.count_as("sessions_closed", "token")
            _log.warning("ending a session: its token is invalid now", session=entry.id, client=entry.client)
            if entry.connection is not None:
                _notify_end(
                    entry.connection,
                    "your token has been revoked or has expired: ask the server's operator for a new one",
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
        _notify_end(entry.connection, reason)
        entry.connection.close()

    def report_full(self, reason: str) -> None:
        """Report that this executor is full, so that the gateway refuses clients for `FULL_SECONDS`."""
        if time.monotonic() - self._reported_full_at > FULL_SECONDS / 2:
            self._reported_full_at = time.monotonic()
            self.send_report(Full(reason))

    def _report_space(self) -> None:
        """If the executor was reported full, report that it admits sessions again."""
        if self._reported_full_at:
            self._reported_full_at = 0.0
            self.send_report(Full(""))

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
        """Admit no further clients. Later calls do nothing."""
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
                _notify_end(entry.connection, "the server was stopped", stopped=True)
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
    count_closed: Callable[[str], None],
    check: Callable[[Exception], None],
) -> Iterator[None]:
    """Log start and end of the session that runs in the block. An error ends only the session.

    `count_closed`: called with a label of the reason if the executor ends the session. `check`: called with internal errors.
    """
    session_log = _log.bind(session=name)
    session_log.info("session began", client=client)
    try:
        with logs.in_context(session=name):
            yield
    except ProtocolError as error:
        count_closed("protocol")
        session_log.warning("session closed: the client sent an invalid message", error=str(error))
        _notify_end(connection, str(error))
    except QuotaExceeded as error:
        count_closed("quota")
        session_log.warning("session closed: the tenant's quota is exhausted", reason=str(error))
        _notify_end(connection, f"the server ended this session: {error}")
    except SessionLost as error:
        count_closed("recovery")
        session_log.error("cannot recover the session", error=str(error))
        _notify_end(connection, f"the session cannot be recovered: {error}")
    except TransportError as error:
        session_log.info("session ended with its connection", error=str(error))
    except Exception as error:
        check(error)
        count_closed("error")
        session_log.exception("session ended by an internal error of the executor", error=repr(error))
        _notify_end(connection, f"the executor failed: {error!r}; its log has the details")
    else:
        session_log.info("session ended")


def _is_recoverable(connection: SessionChannel | None) -> bool:
    """Return True if another process can recover the session of this channel."""
    return isinstance(connection, ExecutorChannel) and connection.journal.open


def _notify_end(connection: SessionChannel, reason: str, *, stopped: bool = False) -> None:
    """Send the reason why a session ends to its client, if connected. `stopped`: as in `ProtocolClose`."""
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
        new_executor = _open_executor(device, start, new)
        start = start.without_secrets()
        with new_executor as executor:
            executor.send_report = control.report
            executor.when_device_is_lost(partial(_end_at_once, control, start.directory))
            operators_digest()  # takes 0.06 s; the first client would wait for it
            urls = executor.listen(start.directory)
            control.report(Ready(urls, os.getpid(), executor.sessions(0).device, str(torch.__version__)))
            _log.info("executor is ready", urls=urls, process=os.getpid())
            remove_abandoned(Path(start.directory).parent)
            freeze_startup_objects()
            control.run(executor, start.config.unused_seconds)
            recovery = start.config.recovery
            if recovery.keeps_journals_if_stopped or (control.orphaned and recovery.keeps_journals_if_orphaned):
                executor.close_observers()
                _end_at_once(control, start.directory, "its parent ended or stopped it")
    except Exception as error:
        is_djinn = isinstance(error, DjinnError)
        if not is_djinn:
            _log.exception("executor failed", error=repr(error))
        control.report(Failed(str(error) if is_djinn else f"the executor failed: {error!r}; its log has the details"))
        return 1
    finally:
        shutil.rmtree(start.directory, ignore_errors=True)
    _log.info("executor ends", process=os.getpid())
    return 0


def _end_at_once(control: Control, directory: str, reason: str) -> None:
    """Remove `directory`, and exit at once. No session is ended and no client is told, so that journals stay."""
    control.report(Failed(reason))
    shutil.rmtree(directory, ignore_errors=True)
    os._exit(1)


def _open_executor(device: str, start: Start, new: SessionFactory) -> Executor:
    config = start.config
    if config.user is not None:
        _make_folders(config, config.user)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    registry = load_plugins(config)
    operators = CustomOperators(config.operators, registry.operators, tenants=config.tenants)
    disk = DiskQuota()
    strategies, compilers = strategies_of(registry, config), compilers_of(registry, config)
    on_demand, idle = not any(s.joins_sessions for s in strategies), config.memory.idle_minutes > 0
    opened = open_device(registry.devices, device)
    opened = with_eviction(opened, config.memory.limit, disk, on_demand=on_demand, idle=idle)
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
        limit_memory(opened.capabilities.memory)
    begin_strategies(context, strategies, compilers)
    store = _open_store(config.store, disk)
    key, config = TicketChecker(start.key), start.without_secrets().config
    return Executor(opened, context, registry, key, new, config, store, operators)


def _make_folders(config: ExecutorConfig, user: SystemUser) -> None:
    """Create the private folders of an executor that runs as its tenant's system user."""
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
        _log.warning("the weight store is off: its directory cannot be used", error=str(error))
        return None


def _take_standard_input() -> int:
    """Move the pipe of orders to another descriptor, and return it. Redirect standard output to the log."""
    orders = os.dup(0)
    null_device = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null_device, 0)
    os.close(null_device)
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
