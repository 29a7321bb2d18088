"""Listen addresses of a server by transport, and the URLs that it announces to clients."""

from __future__ import annotations

import difflib
import ipaddress
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from urllib.parse import urlsplit

import attrs

from djinn_core.errors import ConfigurationError, PluginError, TransportError
from djinn_core.hookspecs.transports import TlsOptions, Transport
from djinn_core.protocol.addresses import address_towards, at_host, is_loopback, is_wildcard, network_location
from djinn_core.protocol.tls_transports import under_tls

# Transports that listen at a TCP port, named here so that their ports can be checked before plugins are loaded.
_OVER_TCP = frozenset({"tcp", "tcps", "http", "https"})
_ELSEWHERE = "192.0.2.1"  # an unused address (RFC 5737)


@attrs.frozen
class ListenAddress:
    """A host and a port to listen at.

    `host`: empty for the default of `ListenAddresses`. `port`: 0 for any free port.
    """

    host: str = ""
    port: int = 0


@attrs.frozen
class ListenAddresses:
    """Listen addresses by transport, as the operator chose them.

    Attributes:
        host: address of transports without an entry in `by_transport`.
        by_transport: address by name of a transport, or by one of its URL schemes.
        without: names or schemes of disabled transports.
    """

    host: str = "127.0.0.1"
    by_transport: Mapping[str, ListenAddress] = attrs.field(factory=dict)
    without: frozenset[str] = frozenset()

    @property
    def hosts(self) -> tuple[str, ...]:
        """All hosts to listen at."""
        other_hosts = tuple(at.host for name, at in self.by_transport.items() if at.host and name not in self.without)
        return (self.host, *other_hosts)

    def fixed(self) -> str:
        """Return host and port of the first transport with a fixed port, as a file name, or "" if no port is fixed."""
        names = sorted(self.by_transport.keys() - self.without, key=lambda name: (name not in {"tcp", "tcps"}, name))
        endpoints = ((self.by_transport[name].host or self.host, self.by_transport[name].port) for name in names)
        return next((f"{host.replace('/', '_')}-{port}" for host, port in endpoints if port), "")

    def of(self, transport: Transport, aliases: Iterable[str] = ()) -> ListenAddress | None:
        """Return the address at which a transport listens, or None if it does not listen.

        `aliases`: further names of the transport.
        """
        names = {transport.name, *transport.schemes, *aliases}
        configured = next((at for name, at in self.by_transport.items() if name in names), None)
        capabilities = transport.capabilities
        if names & self.without or (configured is None and (capabilities.named_only or capabilities.same_host)):
            return None
        configured = configured or ListenAddress()
        return ListenAddress("127.0.0.1" if capabilities.same_host else configured.host or self.host, configured.port)

    def check_ports(self, operations: int | None) -> None:
        """Check that the fixed ports are free, before the slow start of executors.

        Transports outside of `_OVER_TCP` are not checked. `operations`: port of the operations server, or None.

        Raises:
            ConfigurationError: two listeners have the same port.
            TransportError: another program listens at a port.
        """
        entries = [(name, at) for name, at in self.by_transport.items() if name in _OVER_TCP - self.without]
        listeners = [(f"for {name}", at.host or self.host, at.port) for name, at in entries if at.port]
        if operations:
            listeners.append(("for operations", self.host, operations))
        users: dict[tuple[str, int], str] = {}
        for what, host, port in listeners:
            if first_user := users.get((host, port)):
                raise ConfigurationError(f"port {port} is set twice, {first_user} and {what}: change one of them")
            users[host, port] = what
            _check_port(what, host, port)


def _check_port(what: str, host: str, port: int) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        raise TransportError(
            f"cannot listen {what} at {network_location(host, port)}: {error.strerror or error}. Choose another port, or 0 "
            "for any free one"
        ) from error


@attrs.frozen
class ListeningTransport:
    """A transport and the address at which it listens."""

    transport: Transport
    address: ListenAddress

    def url(self, port: int) -> str:
        """Return the URL of a listener at this port."""
        return f"{self.transport.schemes[0]}://{network_location(self.address.host, port)}"


def listening_transports(
    transports: Iterable[Transport], tls: TlsOptions | None, addresses: ListenAddresses
) -> tuple[ListeningTransport, ...]:
    """Return the transports with which a server listens. With a certificate, they use TLS.

    A transport that works only within this host listens only if the operator named an address for it. Such a transport
    uses TLS only if clients must show certificates.

    Raises:
        ConfigurationError: the operator named a transport that has no TLS.
    """
    listening = []
    for plain in transports:
        is_local = plain.capabilities.same_host and (tls is None or tls.authority is None)
        transport = plain if tls is None or is_local else plain.over_tls(tls)
        if transport is None and not addresses.by_transport.keys().isdisjoint({plain.name, *plain.schemes}):
            raise ConfigurationError(
                f"the transport {plain.name!r} has no TLS: leave out its --transport, or the certificates"
            )
        if transport is not None:
            address = addresses.of(transport, (plain.name, *plain.schemes))
            listening += [] if address is None else [ListeningTransport(transport, address)]
    return tuple(listening)


def faster_transports(transports: Iterable[Transport], local: Transport) -> tuple[ListeningTransport, ...]:
    """Return the transports for this host that listen by default and are faster than `local`."""
    all_capabilities = ((transport, transport.capabilities) for transport in transports)
    return tuple(
        ListeningTransport(transport, ListenAddress("127.0.0.1"))
        for transport, traits in all_capabilities
        if traits.same_host and not traits.named_only and traits.speed > local.capabilities.speed
    )


def configured_transports(
    transports: Sequence[Transport], tls: TlsOptions | None, addresses: ListenAddresses
) -> tuple[ListeningTransport, ...]:
    """Check the transports that the operator named, and return the result of `listening_transports`.

    Raises:
        ConfigurationError: the operator named a transport that is not installed or has no TLS.
        PluginError: no transport is left to listen with.
    """
    _check_names(addresses, transports, tls)
    listening = listening_transports(transports, tls, addresses)
    if not listening:
        raise PluginError(
            "no transport is left to listen with: install one, such as plugins/tcp of the checkout. `djinn "
            "plugins` shows installed, broken and disabled plugins"
            + (f". --without-transport excludes {', '.join(sorted(addresses.without))}" if addresses.without else "")
        )
    return listening


def _check_names(addresses: ListenAddresses, transports: Sequence[Transport], tls: TlsOptions | None) -> None:
    names = {name for transport in transports for name in (transport.name, *transport.schemes)}
    tls_transports = () if tls is None else under_tls(transports, tls)
    names |= {name for transport in tls_transports for name in (transport.name, *transport.schemes)}
    for name in sorted({*addresses.by_transport, *addresses.without} - names - _OVER_TCP):
        close = difflib.get_close_matches(name, names, 1)
        known_names = (
            f"known: {', '.join(sorted(names)) or 'none'}. Install its plugin on this server and on its clients."
        )
        hint = f"did you mean {close[0]!r}?" if close else known_names
        raise ConfigurationError(f"no transport is named {name!r}: {hint} `djinn plugins` shows what is installed")


def own_address() -> str:
    """Return this machine's address for other machines: of the default route, else of an interface.

    Return the host name if there is no network.
    """
    try:
        return address_towards(_ELSEWHERE)
    except OSError:
        return next(_interface_addresses(), socket.gethostname())


def _interface_addresses() -> Iterator[str]:
    """Yield the IPv4 addresses of active interfaces, except loopback and link-local addresses."""
    import psutil

    active = {name for name, state in psutil.net_if_stats().items() if state.isup}
    for name, addresses in psutil.net_if_addrs().items():
        for entry in addresses if name in active else ():
            if entry.family == socket.AF_INET:
                address = ipaddress.ip_address(entry.address)
                if not (address.is_loopback or address.is_link_local):
                    yield entry.address


def advertised(urls: Iterable[str], advertise: str, by_name: bool) -> tuple[str, ...]:
    """Return the URLs of a server for its clients, one for each listener.

    Args:
        urls: URLs of the listeners.
        advertise: the operator's host name for this machine; empty: unknown.
        by_name: True to advertise a listener at all interfaces by host name, which is in the certificate; False: by
            address.
    """
    url_list = tuple(urls)
    hosts = [urlsplit(url).hostname or "" for url in url_list]
    local = [is_loopback(host) for host in hosts]
    advertised_urls = []
    for url, host, loopback in zip(url_list, hosts, local, strict=True):
        if advertise and (not loopback or all(local)):
            advertised_urls.append(at_host(url, advertise))
        elif is_wildcard(host):
            advertised_urls.append(at_host(url, socket.getfqdn() if by_name else own_address()))
        else:
            advertised_urls.append(url)
    return tuple(advertised_urls)
