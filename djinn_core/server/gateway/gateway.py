"""The gateway process: admits clients, and starts and supervises the executors."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import attrs

from djinn_core.builtins.tls_contexts import fingerprint_of_file, server_context
from djinn_core.builtins.unauthenticated_limit import Strangers
from djinn_core.config import PluginSetting, Settings, bytes_of
from djinn_core.directories import runtime_directory
from djinn_core.errors import ConfigurationError, PluginError, StartupError
from djinn_core.hookspecs.transports import Listener, TlsOptions, Transport
from djinn_core.launch.command import EXECUTOR_MODULE
from djinn_core.launch.connection_file import ConnectionFile, remove_connection_file, write_connection_file
from djinn_core.launch.listen_addresses import Listening, Places, advertised, chosen_by
from djinn_core.launch.private_directory import make_private_directory
from djinn_core.launch.process import ExecutorOptions, ExecutorProcess
from djinn_core.launch.version import djinn_version
from djinn_core.logs import get_logger
from djinn_core.role import become_server
from djinn_core.server.admission_limits import QUEUE_SECONDS, SESSIONS
from djinn_core.server.gateway.admission import Admission, Counts
from djinn_core.server.gateway.audit import Audit
from djinn_core.server.gateway.authenticator import Authenticator, Identity
from djinn_core.server.gateway.device_discovery import Chosen, offered
from djinn_core.server.gateway.metrics import Observed, exporter
from djinn_core.server.gateway.operations import Operations
from djinn_core.server.gateway.reaper import Watch
from djinn_core.server.gateway.tenants import Tenants
from djinn_core.server.gateway.tokens import Token, check_exposure, find_token, has_table
from djinn_core.server.greetings import STRANGER_LIMITS
from djinn_core.server.malloc_trim import keep_few_arenas, set_start_aside
from djinn_core.wire.messages import Status

if TYPE_CHECKING:
    from djinn_core.server.gateway.operations_listener import OperationsListener

_log = get_logger("djinn.server")


@attrs.frozen
class GatewayOptions:
    """Options of a gateway.

    Attributes:
        places: where to listen, with which transports.
        advertise: host name under which other machines reach this one, for the connection file; empty: found out.
        devices: devices to offer, an executor for each; `all`: every device; empty: the best that the machine has.
        token_file: file with the token, or with a table of tokens; None: the environment's, or a new one.
        operations_port: port for `/livez`, `/readyz` and `/metrics`, 0 for any free one; None: these routes are not served.
        audit_log: file for connections and refusals; None: the log alone.
        connection_file: where to write URLs and token; None: a place of the user's own.
        threads: torch threads of each executor.
        plaintext_accepted: True if the operator accepts unencrypted traffic on a network.
        drain_seconds: time for which sessions may go on after a signal to stop.
        start_timeout: time that the executors may take to start, in seconds.
        plugins, disable, plugin_settings: as in the settings.
        log_level, debug: what the executors log.
        store, store_bytes: directory of weights that need not be sent again, and its limit in bytes; None: nowhere.
        warm: safetensors files whose tensors need not be sent at all.
        compilers: as in the settings.
        memory: bytes that the sessions of each executor may hold; 0: as much as its device has.
        memory_policy: as in the settings.
        tls: the server's certificate, and the authority of client certificates; None: no TLS.
        pinned: True if clients check the certificate by its fingerprint, which is in the connection file.
        lease_seconds: time for which a session waits for a client whose connection broke; 0: it ends with its connection.
        journals, journal_bytes: directory for session journals, from which the next executor recovers the sessions when an
            executor dies, and the limit of each in bytes; None: nowhere.
        snapshot_seconds: shortest time between two snapshots of a session, each of which begins its journal anew.
        most_sessions: the most sessions that each executor serves at a time.
        queue_seconds: longest time that a submission may have waited for its turn when a further session begins.
        executor_module: module that the executors run; only tests change it.
    """

    places: Places = attrs.field(factory=Places)
    advertise: str = ""
    devices: tuple[str, ...] = ()
    token_file: Path | None = None
    operations_port: int | None = None
    audit_log: Path | None = None
    connection_file: Path | None = None
    threads: int | None = None
    plugins: tuple[str, ...] | None = None
    disable: tuple[str, ...] = ()
    plugin_settings: tuple[PluginSetting, ...] = ()
    plaintext_accepted: bool = False
    drain_seconds: float = 30.0
    start_timeout: float = 60.0
    log_level: str = "info"
    debug: str = ""
    store: Path | None = None
    store_bytes: int = 0
    warm: tuple[Path, ...] = ()
    compilers: tuple[str, ...] = ()
    memory: int = 0
    memory_policy: str = ""
    tls: TlsOptions | None = None
    pinned: bool = False
    lease_seconds: float = 30.0
    journals: Path | None = None
    journal_bytes: int = 0
    snapshot_seconds: float = 20.0
    most_sessions: int = SESSIONS
    queue_seconds: float = QUEUE_SECONDS
    executor_module: str = EXECUTOR_MODULE

    def with_settings(self, settings: Settings) -> GatewayOptions:
        """Options with the settings in place of those that the command line does not give."""
        return attrs.evolve(
            self,
            devices=self.devices or ((settings.device,) if settings.device else ()),
            threads=self.threads or settings.threads,
            plugins=settings.plugins,
            disable=settings.disable,
            plugin_settings=settings.plugin_settings,
            compilers=self.compilers or settings.compilers,
            memory=self.memory or bytes_of(settings.memory_gib),
            memory_policy=self.memory_policy or settings.memory_policy,
            start_timeout=settings.start_timeout,
            debug=settings.debug,
        )


@attrs.frozen
class Serving:
    """A gateway that is ready: its addresses, its devices, and the connection file for clients.

    `dialled`: the same addresses as other machines connect to them.
    """

    urls: tuple[str, ...]
    dialled: tuple[str, ...]
    executors: tuple[ExecutorProcess, ...]
    connection_file: Path
    token_from: str
    fingerprint: str = ""
    operations: str = ""


class Gateway:
    """A gateway: its executors, listeners and connection file."""

    def __init__(self, options: GatewayOptions, token: Token, gatekeeper: Authenticator, audit: Audit) -> None:
        self._options = options
        self._token = token
        self._gatekeeper = gatekeeper
        self._audit = audit
        self._tenants: Tenants | None = None
        self._counts, self._strangers = Counts(), Strangers()
        self._operations: OperationsListener | None = None
        self._watch: Watch | None = None
        self._draining = False
        self._listeners: list[Listener] = []
        self._file: tuple[Path, ConnectionFile] | None = None
        self._since = time.monotonic()
        self._accounts: tuple[str, int] | None = None  # a directory, and what holds it

    def start(self, tell: Callable[[str], None]) -> Serving:
        """Start the executors, listen, and write the connection file. `tell` hears what takes long.

        Raises:
            StartupError: an executor did not start.
            TransportError: an address cannot be bound.
            ConfigurationError: the connection file cannot be written.
        """
        expected = lambda: len(self._gatekeeper.tenants)  # noqa: E731 - asked again and again
        self._options.places.check_ports(self._options.operations_port)
        try:
            self._accounts = make_private_directory()
            executors = _executors(self._options, Path(self._accounts[0]))
            names = ", ".join(executor.device or "the best device" for executor in executors)
            tell(f"Starting an executor for {names}: this takes some seconds")
        except OSError as error:
            raise StartupError(f"there is no directory for what tenants use of their time: {error}") from error
        self._tenants = Tenants(executors, self._options.start_timeout, expected)
        self._operations = self._listen_for_operations(self._tenants)
        transports = self._transports()
        chosen = chosen_by(transports, self._options.tls, self._options.places)
        ready = self._tenants.wait_ready()
        self._watch = Watch(self._gatekeeper, self._tenants, self._audit, self._counts)
        urls = self._listen(chosen, transports, self._tenants)
        named = self._options.tls is not None and not self._options.pinned
        dialled = advertised(urls, self._options.advertise, named)
        path = self._options.connection_file or default_connection_file()
        content = ConnectionFile(dialled, self._token.value, self.fingerprint if self._options.pinned else "")
        write_connection_file(path, content)
        self._file = (path, content)
        _log.info("ready", urls=urls, process=os.getpid())
        self._audit.note("started", urls=urls, process=os.getpid())
        operations = self._operations.url if self._operations is not None else ""
        return Serving(urls, dialled, ready, path, self._token.origin, self.fingerprint, operations)

    @property
    def fingerprint(self) -> str:
        """Of the certificate that is shown; empty where there is no TLS."""
        tls = self._options.tls
        return fingerprint_of_file(tls.certificate) if tls is not None and tls.certificate is not None else ""

    def close(self, drain_seconds: float) -> None:
        """Admit no further clients, wait at most `drain_seconds` for sessions to end, then end the executors."""
        self._draining = True
        if self._watch is not None:
            self._watch.close()
        while self._listeners:
            self._listeners.pop().close()
        if self._file is not None:
            remove_connection_file(*self._file)
        if self._tenants is not None:
            self._tenants.close(drain_seconds)
        if self._operations is not None:
            self._operations.close()
        if self._accounts is not None:
            shutil.rmtree(self._accounts[0], ignore_errors=True)
            os.close(self._accounts[1])
            self._accounts = None
        self._audit.note("stopped", process=os.getpid())
        self._audit.close()

    def _transports(self) -> tuple[Transport, ...]:
        # Imported here because they import PyTorch, which takes as long as the executors take to start.
        from djinn_core.builtins import builtin_plugins
        from djinn_core.plugins.registry import Selection, load_registry

        options = self._options
        selection = Selection(options.plugins, frozenset(options.disable), plugin_settings=options.plugin_settings)
        return load_registry(selection, builtins=builtin_plugins(), kinds={"transports"}).transports

    def _listen(
        self, chosen: Sequence[Listening], transports: tuple[Transport, ...], tenants: Tenants
    ) -> tuple[str, ...]:
        status = lambda who: self._status(tenants, who)  # noqa: E731 - bound to these tenants
        kept = (self._strangers, self._counts)
        admission = Admission(self._gatekeeper, tenants, self._audit, transports, self._urls, status, *kept)
        for one in chosen:
            try:
                listener = one.transport.listen(one.at(one.place.port), STRANGER_LIMITS, admission.serve)
            except ImportError as error:
                name = one.transport.name
                raise PluginError(
                    f"the transport {name!r} cannot listen, because a package is missing: {error}. Install it, or leave the "
                    f"transport out: --without-transport {name}"
                ) from error
            self._listeners.append(listener)
        return self._urls()

    def _listen_for_operations(self, tenants: Tenants) -> OperationsListener | None:
        """Start the operations listener before the executors, so that `/readyz` reports that they are not ready yet."""
        port = self._options.operations_port
        if port is None:
            return None
        facts = (djinn_version(), self._since, lambda: self._draining)
        export = exporter(Observed(tenants, self._gatekeeper, self._counts, self._strangers, *facts))
        operations = Operations(self._gatekeeper, self._audit, self._counts, self._why_not_ready, export)
        context = None if self._options.tls is None else server_context(self._options.tls)
        return _operations_listener()(self._options.places.host, port, operations, context)

    def _why_not_ready(self) -> str:
        if self._draining:
            return "draining: no further clients are admitted"
        if not self._listeners or self._tenants is None:
            return "starting"
        return "" if self._tenants.ready else "an executor is being started"

    def _urls(self) -> tuple[str, ...]:
        return tuple(listener.url for listener in self._listeners)

    def _status(self, tenants: Tenants, who: Identity) -> Status:
        shown = tenants.statuses(None if who.sees_all else who.tenant)
        return Status(djinn_version(), os.getpid(), time.monotonic() - self._since, shown)


def serve(
    options: GatewayOptions, announce: Callable[[Serving], None], tell: Callable[[str], None] = lambda _: None
) -> None:
    """Serve until SIGTERM or SIGINT, then let sessions end; `announce` is called when clients can connect.

    `tell` hears meanwhile what is under way.

    Must run in the main thread, because of the signals. A second signal ends the process at once, and with it the
    executors.

    Raises:
        ConfigurationError: it would be open to strangers, or a file cannot be read or written.
        PluginError: there is nothing to listen with.
        StartupError: an executor did not start.
        TransportError: an address cannot be bound.
    """
    table = options.token_file if options.token_file is not None and has_table(options.token_file) else None
    token = find_token(None if table else options.token_file, {} if table else os.environ)
    gatekeeper = Authenticator(token, table)
    for host in options.places.hosts:
        check_exposure(host, token.supplied or table is not None, options.tls is not None or options.plaintext_accepted)
    if options.tls is not None:
        server_context(options.tls)  # what is wrong with the certificate is said before anything starts
    become_server("gateway")
    keep_few_arenas()
    _allow_many_files()
    _leave_no_cores()
    gateway = Gateway(options, token, gatekeeper, Audit(options.audit_log))
    try:
        with _signals_stop():
            announce(gateway.start(tell))
            set_start_aside()
            while True:
                signal.pause()
    except _Stop as stop:
        _log.info("draining", signal=str(stop), seconds=options.drain_seconds)
        gateway.close(options.drain_seconds)
    except BaseException:
        gateway.close(0.0)
        raise
    _log.info("ended", process=os.getpid())


def _allow_many_files() -> None:
    """Each connection takes a file descriptor; what a process may have at first is often a quarter of what it may ask for."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _leave_no_cores() -> None:
    """Disable core dumps, which would contain tokens, keys and data; executors inherit this."""
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))


def _operations_listener() -> type[OperationsListener]:
    """The class, imported here because few servers need aiohttp for it.

    Raises:
        ConfigurationError: the library is missing.
    """
    try:
        from djinn_core.server.gateway.operations_listener import OperationsListener
    except ImportError as error:
        raise ConfigurationError(
            f"the package `aiohttp` serves operations and cannot be imported ({error}): `pip install aiohttp`, or leave out "
            "--operations-port"
        ) from error
    return OperationsListener


def default_connection_file() -> Path:
    """A file of its own for this server, in the user's runtime or state directory."""
    return runtime_directory() / f"server-{os.getpid()}.json"


class _Stop(BaseException):
    """A signal asked the server to stop. It is no `Exception`, so that no handler takes it for an error."""


@contextmanager
def _signals_stop() -> Iterator[None]:
    """Raise `_Stop` in the main thread on SIGTERM and SIGINT; afterwards the signals do what they did before."""

    def stop(number: int, _: FrameType | None) -> None:
        raise _Stop(signal.Signals(number).name)

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _executors(options: GatewayOptions, accounts: Path) -> tuple[ExecutorOptions, ...]:
    """`accounts`: where tenants' time on the devices is written down."""
    devices = offered(
        options.devices, Chosen(options.plugins, options.disable, options.plugin_settings), options.start_timeout
    ) or ("",)
    for number in range(len(devices)):
        (accounts / str(number)).mkdir()
    return tuple(
        ExecutorOptions(
            device=device,
            places=options.places,
            threads=options.threads,
            plugins=options.plugins,
            disable=options.disable,
            plugin_settings=options.plugin_settings,
            log_level=options.log_level,
            debug=options.debug,
            store=options.store,
            store_bytes=options.store_bytes,
            warm=options.warm,
            compilers=options.compilers,
            memory_policy=options.memory_policy,
            memory=options.memory,
            tls=options.tls,
            lease_seconds=options.lease_seconds,
            journals=options.journals,
            journal_bytes=options.journal_bytes,
            snapshot_seconds=options.snapshot_seconds,
            most_sessions=options.most_sessions,
            queue_seconds=options.queue_seconds,
            accounts=accounts / str(number),
            module=options.executor_module,
        )
        for number, device in enumerate(devices)
    )
