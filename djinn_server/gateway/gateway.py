"""The gateway process: admit clients, and start and supervise executors."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Final

import attrs

from djinn_core.errors import ConfigurationError, PluginError, StartupError, install_hint
from djinn_core.logs import get_logger
from djinn_core.protocol.addresses import is_loopback, reaches_network
from djinn_core.protocol.connection_file import ConnectionFile, remove_connection_file, write_connection_file
from djinn_core.protocol.net.tls_contexts import fingerprint_of_file, server_context
from djinn_core.registry.embedded_executors import LOCAL
from djinn_core.registry.kinds import GATEWAY_KINDS
from djinn_core.registry.registry import Registry, load_registry
from djinn_core.system.directories import runtime_directory
from djinn_core.system.role import become_server
from djinn_server.events import ServerEvents
from djinn_server.gateway.admission import Admission
from djinn_server.gateway.assignment import Assigner
from djinn_server.gateway.audit import Audit
from djinn_server.gateway.authentication import Authentication
from djinn_server.gateway.context import GatewayContext, GatewayCounters, RecentEvents
from djinn_server.gateway.device_discovery import ALL, expand_all
from djinn_server.gateway.gateway_config import GatewayConfig
from djinn_server.gateway.operations import watched_server
from djinn_server.gateway.reaper import SessionReaper
from djinn_server.gateway.tenants import Tenants
from djinn_server.gateway.token_authenticator import (
    Token,
    TokenAuthenticator,
    check_exposure,
    find_token,
    has_table,
)
from djinn_server.handshake import UNAUTHENTICATED_LIMITS
from djinn_server.hookspecs.operations import OperationsAddress, OperationsServer
from djinn_server.launch.engines import StartedExecutor, engine_named
from djinn_server.launch.executor_config import ExecutorConfig
from djinn_server.launch.listen_addresses import ListeningTransport, advertised, configured_transports
from djinn_server.launch.system_users import open_users
from djinn_server.malloc_trim import freeze_startup_objects, keep_few_arenas
from djinn_server.rlimits import allow_many_files, disable_core_dumps

_SIGNAL_SECONDS: Final = 1.0  # longest delay before a signal is handled
_log = get_logger("djinn.server")


@attrs.frozen
class GatewayHandle:
    """Facts about a gateway that is ready for clients, for the operator.

    Attributes:
        urls: addresses of all listeners.
        dialled: addresses with this machine's advertised name.
        local_urls: addresses for programs on this host only.
        token_from: origin of the server's own token.
        authenticators: names of the plugins' authenticators in use.
        operations: URL of the operations server; empty: none.
        routes: paths of the operations server.
    """

    urls: tuple[str, ...]
    dialled: tuple[str, ...]
    local_urls: tuple[str, ...]
    executors: tuple[StartedExecutor, ...]
    connection_file: Path
    token_from: str
    fingerprint: str = ""
    operations: str = ""
    authenticators: tuple[str, ...] = ()
    routes: tuple[str, ...] = ()


class Gateway:
    """A gateway with its executors, listeners and connection file."""

    def __init__(self, config: GatewayConfig, token: Token, authentication: Authentication, audit: Audit) -> None:
        self._config = config
        self._token = token
        self._authentication = authentication
        self._audit = audit
        self._counts = GatewayCounters()
        self._recent = RecentEvents()
        self._events = ServerEvents.of("gateway", self._counts, audit, self._recent)
        self._context: GatewayContext | None = None
        self._operations: OperationsServer | None = None
        self._reaper: SessionReaper | None = None
        self._file: tuple[Path, ConnectionFile] | None = None

    def start(self, notify: Callable[[str], None]) -> GatewayHandle:
        """Start the executors, listen, and write the connection file. `notify`: called with messages about slow steps.

        Raises:
            StartupError: an executor did not start.
            TransportError: an address cannot be bound.
            ConfigurationError: the connection file cannot be written, or an authenticator is not configured.
            PluginError: an authenticator or the assignment policy does not exist.
        """
        self._config.network.listen_at.check_ports(self._config.access.operations_port)
        try:
            executors = _executors(self._config)
            names = ", ".join(dict.fromkeys(executor.device or "the best device" for executor in executors))
            number = "an executor" if len(executors) == 1 else f"{len(executors)} executors"
            notify(f"Starting {number} for {names}: this takes some seconds")
        except OSError as error:
            raise StartupError(f"cannot create the directory for the tenants' used device time: {error}") from error
        is_remote = self._config.engine.name not in {"", LOCAL}
        if is_remote and self._config.tenant_users:
            raise ConfigurationError(
                f"--tenant-user starts executors on this machine, but --engine {self._config.engine.name} starts them elsewhere: leave out one option"
            )
        remote = self._plugins() if is_remote else None  # before the executors start, because a plugin starts them
        tenants = Tenants(
            executors,
            self._config.start_timeout,
            lambda: self._authentication.expected,
            events=self._events,
            engine=engine_named(self._config.engine.name or LOCAL, remote.executors if remote is not None else ()),
            requests=partial(self._config.engine.requests, len(executors), notify),
            users=open_users(
                self._config.tenant_users, self._config.tenant_dir, _weight_folders(self._config.executor)
            ),
        )
        self._context = context = GatewayContext(
            self._authentication, tenants, self._events, self._counts, self._recent
        )
        registry = remote or self._plugins()
        assigner = Assigner.of(registry, self._config.assignment, self._counts.assignments)
        listen = configured_transports(registry.transports, self._config.network.tls, self._config.network.listen_at)
        operations = self._start_operations(registry, context, assigner.policy.name)
        ready = tenants.wait_ready()
        urls = self._listen(listen, registry, context, assigner)
        by_name = self._config.network.tls is not None and not self._config.pinned
        traits = [(url, listening.transport.capabilities) for url, listening in zip(urls, listen, strict=True)]
        local_urls = tuple(url for url, trait in traits if trait.same_host)
        # Clients may name other addresses themselves. They use addresses of the connection file unchanged.
        network_urls = [url for url, trait in traits if not (trait.named_only or trait.same_host)]
        dialled = advertised(network_urls, self._config.advertise, by_name)
        # A copy of the file on another machine must not lead to a socket there.
        file_urls = dialled if any(map(reaches_network, dialled)) else (*dialled, *local_urls)
        path = self._config.connection_file or default_connection_file(self._config)
        content = ConnectionFile(file_urls, self._token.value, self.fingerprint if self._config.pinned else "")
        write_connection_file(path, content)
        self._file = (path, content)
        _log.info("ready", urls=urls, process=os.getpid())
        self._events.emit("started", urls=urls, process=os.getpid())
        routes = self._operations.routes if self._operations is not None else ()
        facts = (self._token.origin, self.fingerprint, operations, self._config.access.authenticators, routes)
        return GatewayHandle(urls, dialled, local_urls, ready, path, *facts)

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the gateway's certificate; empty without TLS."""
        tls = self._config.network.tls
        return fingerprint_of_file(tls.certificate) if tls is not None and tls.certificate is not None else ""

    def close(self, drain_seconds: float) -> None:
        """Admit no further clients, wait at most `drain_seconds` for sessions to end, then end the executors."""
        context = self._context
        if context is not None:
            context.draining.set()
        if self._reaper is not None:
            self._reaper.close()
        while context is not None and context.listeners:
            context.listeners.pop().close()
        if self._file is not None:
            remove_connection_file(*self._file)
        if context is not None:
            context.tenants.close(drain_seconds)
        if self._operations is not None:
            self._operations.close()
        self._events.emit("stopped", process=os.getpid())
        self._events.close()
        self._audit.close()

    def _plugins(self) -> Registry:
        """Load the plugins of a gateway, activate their authenticators and observers, and return the registry."""
        # Imported here: it imports PyTorch, which takes as long as starting the executors.
        from djinn_core.registry.builtin_plugins import builtin_plugins

        kinds = GATEWAY_KINDS - {"devices"}  # devices are queried in a separate process
        registry = load_registry(self._config.executor.plugins, builtins=builtin_plugins(), kinds=kinds)
        self._authentication.use(registry, self._config.access.authenticators)
        self._events.observe_with(registry)
        return registry

    def _listen(
        self, transports: Sequence[ListeningTransport], registry: Registry, context: GatewayContext, assigner: Assigner
    ) -> tuple[str, ...]:
        admission = Admission(context, registry.transports, assigner=assigner)
        self._reaper = SessionReaper(context)
        for listening in transports:
            try:
                listener = listening.transport.listen(
                    listening.url(listening.address.port), UNAUTHENTICATED_LIMITS, admission.serve
                )
            except ImportError as error:
                name = listening.transport.name
                raise PluginError(
                    f"the transport {name!r} cannot listen, because a package is missing: {error}. Install it, or leave the "
                    f"transport out: --without-transport {name}"
                ) from error
            context.listeners.append(listener)
        return context.urls

    def _start_operations(self, registry: Registry, context: GatewayContext, assignment: str) -> str:
        """Start the operations server and return its URL, or return "" if the operator did not choose a port.

        The server starts before the executors are ready, so that `/readyz` can report that they are not ready.

        Raises:
            PluginError: no plugin serves operations.
            TransportError: the address cannot be bound.
        """
        access, network = self._config.access, self._config.network
        if access.operations_port is None:
            return ""
        if not registry.operations:
            raise PluginError(
                f"--operations-port needs a plugin that serves operations, and none is in use: run {install_hint('plugins/observability')}, "
                "or remove --operations-port. `djinn plugins` shows installed, disabled and broken plugins"
            )
        address = OperationsAddress(network.listen_at.host, access.operations_port, network.tls, access.open_probes)
        operations = registry.operations[0]
        url: str = operations.start(watched_server(context, assignment), address)
        self._operations = operations
        return url


def serve(
    config: GatewayConfig, announce: Callable[[GatewayHandle], None], notify: Callable[[str], None] = lambda _: None
) -> None:
    """Run a gateway until SIGTERM or SIGINT, then wait for sessions to end.

    Call this in the main thread, because of the signals. A second signal ends this process and the executors at once.

    Args:
        config: configuration of the gateway.
        announce: called when clients can connect.
        notify: called with messages about slow steps.

    Raises:
        ConfigurationError: unauthenticated clients could connect, folders overlap, or a file cannot be read or written.
        PluginError: no transport can listen.
        StartupError: an executor did not start.
        TransportError: an address cannot be bound.
    """
    config.executor.check_folders()
    access, network = config.access, config.network
    token_file = access.token_file
    table_file = token_file if token_file is not None and has_table(token_file) else None
    folder = config.state_dir if config.lasting else None
    token = find_token(None if table_file else token_file, {} if table_file else os.environ, folder)
    authentication = Authentication(TokenAuthenticator(token, table_file))
    has_credentials = token.supplied or table_file is not None or bool(access.authenticators)
    if network.tls is not None:
        server_context(network.tls)  # raises on an invalid certificate before anything starts
    become_server("gateway")
    is_protected = network.tls is not None or access.plaintext_accepted
    if not (has_credentials and is_protected):
        for host in _listening_hosts(config):
            check_exposure(host, has_credentials, is_protected)
    keep_few_arenas()
    allow_many_files()
    disable_core_dumps()
    gateway = Gateway(config, token, authentication, Audit(access.audit_log))
    signals: list[str] = []
    try:
        with suppress(_Stop), _signals_stop(signals):
            announce(gateway.start(notify))
            freeze_startup_objects()
            while not signals:
                # Handlers run only in this thread, and the kernel may deliver the signal to another one: `pause` would
                # not return.
                time.sleep(_SIGNAL_SECONDS)
    except BaseException:
        gateway.close(0.0)
        raise
    _log.info("draining", signal=signals[0], seconds=config.drain_seconds)
    gateway.close(config.drain_seconds)
    _log.info("ended", process=os.getpid())


def _listening_hosts(config: GatewayConfig) -> Iterable[str]:
    """Return the hosts at which the server listens. Transports for this host are at 127.0.0.1."""
    network = config.network
    if all(map(is_loopback, network.listen_at.hosts)):
        return network.listen_at.hosts  # avoids the second that loading plugins takes
    from djinn_core.registry.builtin_plugins import builtin_plugins

    registry = load_registry(config.executor.plugins, builtins=builtin_plugins(), kinds={"transports"})
    listening = configured_transports(registry.transports, network.tls, network.listen_at)
    operations = [network.listen_at.host] if config.access.operations_port is not None else []
    return dict.fromkeys([transport.address.host for transport in listening] + operations)


def default_connection_file(config: GatewayConfig) -> Path:
    """Return the path of the connection file: in the state folder if a later server uses it again, else a temporary one."""
    if config.lasting and config.state_dir is not None:
        return config.state_dir / "connection.json"
    return runtime_directory() / f"server-{os.getpid()}.json"


class _Stop(BaseException):
    """Raised when a signal asks the server to stop. It is no `Exception`, so that no handler treats it as an error."""


@contextmanager
def _signals_stop(signals: list[str]) -> Iterator[None]:
    """Raise `_Stop` in the main thread on SIGTERM and SIGINT. Restore the previous handlers at the end.

    Also add the signal's name to `signals`, because `_Stop` is lost if it is raised in a finalizer or callback.
    """

    def stop(number: int, _: FrameType | None) -> None:
        signals.append(signal.Signals(number).name)
        raise _Stop

    previous_handlers = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)


def _executors(config: GatewayConfig) -> tuple[ExecutorConfig, ...]:
    """Return the configuration of each executor, with a directory for the used device time of tenants."""
    devices: Sequence[str]
    if config.engine.name in {"", LOCAL}:
        devices = expand_all(config.devices, config.executor.plugins, config.start_timeout) or ("",)
    elif ALL in config.devices:
        raise ConfigurationError(
            f"--device all lists the devices of this machine, but the engine {config.engine.name} starts executors elsewhere: "
            "set --executors, and the resources of each executor with the setting `resources`"
        )
    else:
        devices = (config.devices or ("",)) * config.engine.executors
    return tuple(config.executor_on(device, _accounts(config, number)) for number, device in enumerate(devices))


def _weight_folders(config: ExecutorConfig) -> list[Path]:
    """Return the folders from which the executors of all tenants read models, and in which they save weights."""
    saving = config.models.saving
    return [*config.models.folders, *([] if saving is None else [saving])]


def _accounts(config: GatewayConfig, number: int) -> Path | None:
    """Create and return the folder for the used device time of tenants, or return None without a state folder."""
    if config.state_dir is None:
        return None
    folder = config.state_dir / "accounts" / str(number)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder
