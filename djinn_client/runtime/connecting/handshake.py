"""Handshake: connect to a server's gateway and then to one of its executors, over the fastest transport that works."""

from __future__ import annotations

import getpass
import hashlib
import os
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, TypeVar
from urllib.parse import SplitResult

import attrs
import msgspec
import torch

from djinn_core import torch_private
from djinn_core.errors import (
    AccessRefused,
    ConfigurationError,
    DjinnError,
    PluginError,
    ProtocolError,
    ServerBusy,
    TransportError,
)
from djinn_core.hookspecs.transports import Connection, Frame, Limits, TlsOptions, Transport
from djinn_core.ir import layout_operators, operators
from djinn_core.logs import get_logger
from djinn_core.protocol.addresses import (
    at_host,
    has_transport,
    is_loopback,
    is_own_socket,
    parse_url,
    transport_for,
)
from djinn_core.protocol.tls_transports import secure_schemes, transports_trusting
from djinn_core.registry.version import djinn_version
from djinn_core.system.directories import cache_directory
from djinn_core.system.files import user_id
from djinn_core.system.printable import one_line
from djinn_core.system.shared_files import replace_file, version_of
from djinn_core.wire.message_base import Message
from djinn_core.wire.messages import (
    PROTOCOL_VERSION,
    Attach,
    Attached,
    Hello,
    ProtocolClose,
    Refused,
    Welcome,
    decode,
    encode,
)

# A firewall may drop packets without a reply. Use a short timeout, because the relay still works.
DIRECT_SECONDS = 3.0
REASON_SECONDS = 1.0  # limit of the wait for the reason of a close
DIGESTS_LIMIT: Final = 64  # maximum number of digests in their file
BYTES_LIMIT: Final = 1 << 16  # maximum size of that file
# limit in bytes of a first reply: an unknown server must not make this process allocate a gigabyte
GREETING = Limits(head=4 << 20, body=0, buffers=0)

_log = get_logger("djinn.runtime")
M = TypeVar("M", bound=Message)


@attrs.frozen
class Server:
    """A server, and how a client reaches it.

    Attributes:
        urls: addresses of the server.
        token: the client's token for the server.
        transports: the transports that the client may use.
        timeout: limit in seconds for each connection attempt and each reply.
    """

    urls: tuple[str, ...]
    token: str = attrs.field(repr=False)
    transports: tuple[Transport, ...]
    timeout: float


class Gateway(msgspec.Struct, frozen=True):
    """A gateway that admitted this client.

    Attributes:
        connection: the connection to the gateway.
        url: the address in use.
        welcome: the gateway's reply.
        fallbacks: addresses that failed before this address, each with the reason.
        relayed: True if the transport is a relay, so that the gateway's address is not its machine's address.
    """

    connection: Connection
    url: str
    welcome: Welcome
    fallbacks: tuple[str, ...] = ()
    relayed: bool = False


class ReachedExecutor(msgspec.Struct, frozen=True):
    """An executor that admitted this client.

    Attributes:
        connection: the connection to the executor, perhaps through the gateway.
        attached: the executor's reply.
        url: the address in use.
        fallbacks: addresses that failed before this address, each with the reason.
        welcome: the reply of the executor's gateway.
        relayed: True if the gateway relays frames between client and executor.
    """

    connection: Connection
    attached: Attached
    url: str
    fallbacks: tuple[str, ...]
    welcome: Welcome
    relayed: bool = False


def reach_executor(server: Server, device: str, hint: str = "", secondary: bool = False) -> ReachedExecutor:
    """Connect to an executor of `server`, directly or relayed by the gateway.

    Args:
        server: the server.
        device: name or number of the requested device. Empty: the server chooses.
        hint: description of the work, which may affect the server's choice of an executor.
        secondary: True if the session will cause no load.

    Raises:
        PluginError: no transport serves any address of the server.
        ServerBusy: the server is full at present.
        TransportError: no server answers, the answer does not come from a Djinn server, or the executor cannot be
            reached either way.
        AccessRefused: the server or the executor refused this client. The message says why.
    """
    gateway = reach_gateway(server, device, hint, secondary)
    executor = None
    try:
        executor = _reach_behind(gateway, server)
    finally:
        if executor is None or not executor.relayed:
            gateway.connection.close()
    return executor


def reach_gateway(server: Server, device: str, hint: str = "", secondary: bool = False) -> Gateway:
    """Connect to the first address of `server` that answers, fastest transport first. Present the token.

    Arguments and errors are those of `reach_executor`.
    """
    transports, urls = server.transports, server.urls
    hello = Hello(
        PROTOCOL_VERSION, server.token, djinn_version(), str(torch.__version__), device, client_name(), hint, secondary
    )
    errors: list[tuple[str, DjinnError]] = []
    for url in _fastest_first(urls, transports):
        try:
            connection, welcome = greet(url, hello, Welcome, server)
        except (AccessRefused, ServerBusy):
            raise
        except DjinnError as error:
            errors.append((url, error))
            continue
        connection.limits = Limits()
        fallbacks = tuple(failure_text(*pair) for pair in (*_unusable_urls(urls, url, transports), *errors))
        return Gateway(connection, url, welcome, fallbacks, transport_for(url, transports).capabilities.relayed)
    reason = unreachable([error for _, error in errors])
    raise reason from next((error for _, error in errors if error is not reason), None)


def _reach_behind(gateway: Gateway, server: Server) -> ReachedExecutor:
    """Connect to the executor that `gateway` named. If that fails, ask the gateway to relay frames."""
    fallbacks, welcome = list(gateway.fallbacks), gateway.welcome
    for url, transport in direct_addresses(gateway, server.transports):
        try:
            connection = transport.connect(url, GREETING, min(server.timeout, DIRECT_SECONDS))
            attached = attach(connection, welcome.ticket, server.timeout, url)
        except ServerBusy:
            raise
        except DjinnError as error:  # another program may listen at this address, for example at the end of a tunnel
            fallbacks.append(failure_text(url, error))
            continue
        return ReachedExecutor(connection, attached, url, tuple(fallbacks), welcome)
    try:
        attached = attach(gateway.connection, welcome.ticket, server.timeout, gateway.url)
    except AccessRefused as error:  # an executor that was reached before may have sent the reason
        raise AccessRefused("; ".join([str(error), *fallbacks])) from error
    return ReachedExecutor(gateway.connection, attached, gateway.url, tuple(fallbacks), welcome, relayed=True)


def attach(connection: Connection, ticket: str, timeout: float, url: str = "the executor") -> Attached:
    """Present the ticket to the executor. Close the connection if the executor refuses it.

    Raises:
        TransportError: no proper reply within `timeout` seconds.
        AccessRefused: the executor refused.
    """
    attached = ask(connection, Attach(ticket, cached_operators_digest()), Attached, timeout, url)
    connection.limits = Limits()
    return attached


def greet(url: str, question: Message, kind: type[M], server: Server) -> tuple[Connection, M]:
    """Connect to an address of `server`, send `question`, and return the connection and the reply of the class `kind`.

    Raises:
        PluginError: no transport serves the address.
        TransportError: no server answers at the address. If the server closes without a reply, as a TLS server does,
            the message suggests TLS.
        AccessRefused: the server refused.
    """
    transport = transport_for(url, server.transports)
    hint = _tls_hint(transport, url)
    try:
        connection = transport.connect(url, GREETING, server.timeout)
    except TransportError as error:
        if isinstance(error.__cause__, TransportError):  # the transport connected, but the other end closed
            raise TransportError(f"{error}{hint}") from error
        raise
    return connection, ask(connection, question, kind, server.timeout, url, hint)


def _tls_hint(transport: Transport, url: str) -> str:
    """Return advice for an address without TLS whose server closes the connection. Return "" if the scheme has no TLS."""
    variant = transport.over_tls(TlsOptions())
    scheme, _, location = url.partition("://")
    tls_schemes = dict(zip(transport.schemes, variant.schemes, strict=False)) if variant is not None else {}
    return (
        f". If that server uses TLS, its address is {tls_schemes[scheme]}://{location}" if scheme in tls_schemes else ""
    )


def client_name() -> str:
    """Return the name of this client in `djinn status`."""
    try:
        user = getpass.getuser()
    except (ImportError, KeyError, OSError):  # the user of a container or of a Windows service may have no name
        user = str(user_id())
    return one_line(f"{user}@{socket.gethostname()} process {os.getpid()}")[:256]


def ask(connection: Connection, question: Message, kind: type[M], timeout: float, url: str, hint: str = "") -> M:
    """Send `question`, and return the reply of the class `kind`. Close the connection if this raises.

    `url`: address of the other end, for messages. `hint`: ends the message if the other end closes without a reply.

    Raises:
        TransportError: no proper reply within `timeout` seconds.
        AccessRefused: the other end refused this client. The message says why.
    """
    try:
        reply = decode(_reply_to(connection, question, timeout, hint).head)
        if isinstance(reply, Refused):
            raise _refusal(reply, url)
        if not isinstance(reply, kind):
            detail = getattr(reply, "reason", type(reply).__name__)
            raise TransportError(f"{url} did not answer with a {kind.__name__}: {detail}")
    except TimeoutError as error:
        connection.close()
        raise TransportError(f"{url} did not answer within {timeout:g} s (setting connect_timeout)") from error
    except ProtocolError as error:
        connection.close()
        raise TransportError(f"the program that answers at {url} is not a Djinn server: {error}") from error
    except DjinnError:
        connection.close()
        raise
    return reply


def _refusal(reply: Refused, url: str) -> DjinnError:
    reason = f"{url} refused: {reply.reason}"
    if reply.retry:
        return ServerBusy(reason, reply.retry_after)
    error = AccessRefused(reason)
    error.crashes_executors = reply.crashes_executors
    return error


def _reply_to(connection: Connection, question: Message, timeout: float, hint: str) -> Frame:
    try:
        connection.send(Frame(encode(question)))
    except TransportError as error:
        # The other end may have sent the reason for its close before it read the question.
        try:
            return connection.receive(REASON_SECONDS)
        except (TransportError, TimeoutError):
            raise TransportError(f"{error}{hint}") from None
    try:
        return connection.receive(timeout)
    except TransportError as error:
        raise TransportError(f"{error}{hint}") from error


def slowness(url: str, transports: Iterable[Transport]) -> float:
    """Return a sort key of an address: greater for slower transports, infinite without a transport."""
    candidates = tuple(transports)
    return -transport_for(url, candidates).capabilities.speed if has_transport(url, candidates) else float("inf")


def _fastest_first(urls: Iterable[str], transports: tuple[Transport, ...]) -> list[str]:
    """Return `urls`, sorted by the speed of their transports.

    Addresses without a transport come last. They stay in the list so that errors name them.
    """
    return sorted(urls, key=lambda url: slowness(url, transports))


def direct_addresses(gateway: Gateway, transports: tuple[Transport, ...]) -> list[tuple[str, Transport]]:
    """Return the executor's addresses that this client can try, fastest first.

    Return an empty list behind a relayed transport, a tunnel or a proxy, because the addresses may lead to another
    server.
    """
    if gateway.relayed:
        return []
    if _is_proxied(gateway):
        _log.info("the server is behind a tunnel or a proxy: the gateway relays frames", url=gateway.url)
        return []
    gateway_url = parse_url(gateway.url)
    any_machine = bool(gateway.welcome.fingerprint)
    if any_machine and not _is_authentic(gateway_url, transports):
        _log.warning(
            "the executor's addresses on another machine are not used, because the gateway was reached without TLS",
            url=gateway.url,
        )
        return []
    trusted = transports_trusting(transports, gateway.welcome.fingerprint)
    urls = _fastest_first(_usable_urls(gateway.welcome.urls, gateway_url, trusted, any_machine), trusted)
    return [(url, transport_for(url, trusted)) for url in urls]


def _is_authentic(gateway_url: SplitResult, transports: tuple[Transport, ...]) -> bool:
    """Return True if no other machine can have answered in place of the gateway."""
    host = gateway_url.hostname or ""
    return gateway_url.scheme in secure_schemes(transports) or not host or is_loopback(host)


def _usable_urls(
    urls: Iterable[str], gateway_url: SplitResult, transports: tuple[Transport, ...], any_machine: bool
) -> Iterator[str]:
    """Yield the addresses of an executor in `urls` that a client may use.

    By default, an address must lead to the host of `gateway_url`, or to a socket of this user, so that a server cannot
    redirect clients to third parties. It must use TLS if `gateway_url` does. A transport that is local, or that must be
    named, is used only if `gateway_url` uses it.

    `any_machine`: True if addresses may lead to any machine, with TLS and a certificate that the transports accept.
    """
    host, secure = gateway_url.hostname or "", secure_schemes(transports)
    for url in urls:
        try:
            scheme, transport = parse_url(url).scheme, transport_for(url, transports)
        except (ConfigurationError, PluginError) as error:
            _log.debug("an address of the server is not used", error=str(error))
            continue
        if transport.capabilities.named_only and gateway_url.scheme not in transport.schemes:
            _log.debug("an address of the server is not used, because its scheme was not configured", url=url)
        elif transport.capabilities.same_host:
            is_near = not any_machine and (not host or is_loopback(host))
            if is_near and (is_own_socket(url) or (scheme != "unix" and gateway_url.scheme in transport.schemes)):
                yield url
        elif (any_machine or gateway_url.scheme in secure) and scheme not in secure:
            _log.warning("an address of the server is not used, because it has no TLS", url=url)
        else:
            yield at_host(url, host) if host and not any_machine else url


def _is_proxied(gateway: Gateway) -> bool:
    gateway_url = parse_url(gateway.url)
    listening = [parse_url(url) for url in gateway.welcome.gateway]
    return (gateway_url.scheme, gateway_url.port) not in {(url.scheme, url.port) for url in listening}


def _unusable_urls(
    urls: Sequence[str], used_url: str, transports: tuple[Transport, ...]
) -> Iterator[tuple[str, PluginError]]:
    """Yield the addresses without a transport that precede `used_url`, each with its error."""
    for url in urls[: urls.index(used_url)]:
        try:
            transport_for(url, transports)
        except PluginError as error:
            yield url, error


def failure_text(url: str, error: DjinnError) -> str:
    """Return a text with an address and the reason why it failed."""
    return f"{url} because: {error}"


def unreachable(errors: Sequence[DjinnError]) -> DjinnError:
    """Return the error for the case that no server could be reached."""
    misnamed = [error for error in errors if isinstance(error, (PluginError, ConfigurationError))]
    if errors and len(misnamed) == len(errors):
        return misnamed[0]
    reasons = "; ".join(str(error) for error in errors) or "no server is configured"
    end = "" if reasons.endswith("?") else "."
    return TransportError(f"cannot reach a server: {reasons}{end} Run `djinn doctor` to find the cause")


def close_reason(connection: Connection) -> str:
    """Return the reason for which the other end closed the connection, or an empty text. Drop other received frames."""
    deadline = time.monotonic() + REASON_SECONDS
    try:
        while True:
            message = decode(connection.receive(max(0.0, deadline - time.monotonic())).head)
            if isinstance(message, ProtocolClose):
                return message.reason
    except (TimeoutError, TransportError, ProtocolError) as error:
        get_logger("djinn.session").debug("the peer closed the connection without a reason", detail=str(error))
        return ""


def cached_operators_digest() -> str:
    """Return the digest of the allow-list of ops. An earlier process may have cached the digest on disk."""
    path = cache_directory() / "operators.json"
    try:
        key = _digest_key()
    except OSError:  # Djinn was imported from an archive
        return operators.operators_digest()
    digests = _read_digests(path)
    if (digest := digests.get(key)) is None:
        digest = digests[key] = operators.operators_digest()
        _write_digests(path, digests)
    return digest


def _digest_key() -> str:
    files = [version_of(Path(str(module.__file__))) for module in (operators, layout_operators)]
    names = sorted(name for name in torch_private.dispatched_operators() if name.startswith("aten::"))
    facts = (torch.__version__, torch.version.git_version, files, names)
    return hashlib.blake2b(repr(facts).encode(), digest_size=16).hexdigest()


def _read_digests(path: Path) -> dict[str, str]:
    try:
        if path.stat().st_size <= BYTES_LIMIT:
            return msgspec.json.decode(path.read_bytes(), type=dict[str, str])
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        pass
    return {}


def _write_digests(path: Path, digests: dict[str, str]) -> None:
    latest = dict(list(digests.items())[-DIGESTS_LIMIT:])
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_file(path, msgspec.json.encode(latest))
    except OSError as error:
        _log.debug("the digest of the allow-list could not be cached", file=str(path), error=str(error))
