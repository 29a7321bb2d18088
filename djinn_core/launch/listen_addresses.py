"""Listen addresses of a server: host and port for each transport, and the addresses advertised to clients."""

from __future__ import annotations

import difflib
import socket
from collections.abc import Iterable, Mapping, Sequence
from urllib.parse import urlsplit

import attrs

from djinn_core.errors import ConfigurationError, PluginError, TransportError
from djinn_core.hookspecs.transports import SecurableTransport, TlsOptions, Transport
from djinn_core.launch.addresses import at_host, is_loopback, is_wildcard, network_location

# Of these it is known before any plugin is loaded that they listen at a port of TCP.
_OVER_TCP = frozenset({"tcp", "tcps", "http", "https"})
_SOMEWHERE = "192.0.2.1"  # an address that is reserved for documents (RFC 5737)


@attrs.frozen
class ListenAddress:
    """An address and a port to listen at; an empty host is that of the server, port 0 any free one."""

    host: str = ""
    port: int = 0


@attrs.frozen
class ListenAddresses:
    """Listen addresses by transport, as the operator configured them.

    Attributes:
        host: address for transports of which nothing else is said.
        given: by name of a transport, or a URL scheme of it.
        without: transports, by name or scheme, that do not listen at all.
    """

    host: str = "127.0.0.1"
    given: Mapping[str, ListenAddress] = attrs.field(factory=dict)
    without: frozenset[str] = frozenset()

    @property
    def hosts(self) -> tuple[str, ...]:
        """Every address that is listened at."""
        others = tuple(place.host for name, place in self.given.items() if place.host and name not in self.without)
        return (self.host, *others)

    def of(self, transport: Transport, others: Iterable[str] = ()) -> ListenAddress | None:
        """Listen address of a transport; None if it does not listen. `others`: further names of the transport."""
        names = {transport.name, *transport.schemes, *others}
        given = next((place for name, place in self.given.items() if name in names), None)
        if names & self.without or (given is None and transport.capabilities.named_only):
            return None
        given = given or ListenAddress()
        return ListenAddress(given.host or self.host, given.port)

    def check_ports(self, operations: int | None) -> None:
        """Find out that a port is taken before seconds are spent on starting executors.

        Only of transports that are known to listen at ports of TCP; others say so when they listen.

        Raises:
            ConfigurationError: two listeners are to have the same port.
            TransportError: something else listens there.
        """
        given = [(name, place) for name, place in self.given.items() if name in _OVER_TCP - self.without]
        wanted = [(f"for {name}", place.host or self.host, place.port) for name, place in given if place.port]
        if operations:
            wanted.append(("for operations", self.host, operations))
        taken: dict[tuple[str, int], str] = {}
        for what, host, port in wanted:
            if other := taken.get((host, port)):
                raise ConfigurationError(f"port {port} is given twice, {other} and {what}: choose another for one")
            taken[host, port] = what
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
class Listening:
    """A transport that listens, and its listen address."""

    transport: Transport
    place: ListenAddress

    def at(self, port: int) -> str:
        """URL of the listener at that port."""
        return f"{self.transport.schemes[0]}://{network_location(self.place.host, port)}"


def in_places(
    transports: Iterable[Transport], tls: TlsOptions | None, places: ListenAddresses
) -> tuple[Listening, ...]:
    """The transports that reach other machines and were not left out, under TLS where there is a certificate."""
    found = []
    for plain in transports:
        transport = plain if tls is None else plain.secured(tls) if isinstance(plain, SecurableTransport) else None
        if transport is not None and not plain.capabilities.same_host:
            place = places.of(transport, (plain.name, *plain.schemes))
            found += [] if place is None else [Listening(transport, place)]
    return tuple(found)


def chosen_by(
    transports: Sequence[Transport], tls: TlsOptions | None, places: ListenAddresses
) -> tuple[Listening, ...]:
    """The transports of `in_places`, after checking the operator's configuration.

    Raises:
        ConfigurationError: `places` names a transport that there is not.
        PluginError: there is none left to listen with.
    """
    _check_names(places, [t for t in transports if not t.capabilities.same_host], tls)
    found = in_places(transports, tls, places)
    if not found:
        raise PluginError(
            "there is no transport to listen with: install one, such as those in plugins/transports of the checkout; `djinn "
            "plugins` shows what is installed and what is broken or disabled"
            + (f", and --without-transport leaves out {', '.join(sorted(places.without))}" if places.without else "")
        )
    return found


def _check_names(places: ListenAddresses, transports: Sequence[Transport], tls: TlsOptions | None) -> None:
    names = {name for one in transports for name in (one.name, *one.schemes)}
    secured = [one.secured(tls) for one in transports if tls is not None and isinstance(one, SecurableTransport)]
    names |= {name for one in secured for name in (one.name, *one.schemes)}
    for name in sorted({*places.given, *places.without} - names - _OVER_TCP):
        close = difflib.get_close_matches(name, names, 1)
        hint = f"did you mean {close[0]!r}?" if close else f"there are: {', '.join(sorted(names)) or 'none'}."
        raise ConfigurationError(f"There is no transport {name!r} to listen with: {hint} `djinn plugins` shows why.")


def own_address(named: bool) -> str:
    """The address, or with `named` the name, by which other machines reach this one; a loopback address where none is known."""
    if named:
        return socket.getfqdn()
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((_SOMEWHERE, 9))  # sends nothing: only a route is looked for
            return str(probe.getsockname()[0])
    except OSError:  # no network at all
        return socket.gethostname()


def advertised(urls: Iterable[str], advertise: str, named: bool) -> tuple[str, ...]:
    """The addresses of a server as clients are told them.

    Args:
        urls: where it listens.
        advertise: how the operator says that other machines reach this one; empty: found out where it matters.
        named: whether a name is wanted rather than an address, as certificates have it.
    """
    listed = tuple(urls)
    local = [is_loopback(urlsplit(url).hostname or "") for url in listed]
    told = []
    for url, loopback in zip(listed, local, strict=True):
        if advertise and (not loopback or all(local)):
            told.append(at_host(url, advertise))
        elif is_wildcard(urlsplit(url).hostname or ""):
            told.append(at_host(url, own_address(named)))
        else:
            told.append(url)
    return tuple(told)
