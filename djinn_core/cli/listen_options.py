"""Options of `djinn serve` that say where it listens, and with which transports."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import attrs
import click

from djinn_core.errors import ConfigurationError
from djinn_core.launch.addresses import is_wildcard
from djinn_core.launch.listen_addresses import ListenAddress, ListenAddresses

_PORT = click.IntRange(0, 65535)
_LISTEN_ADDRESS = re.compile(
    r"(?P<name>[A-Za-z][A-Za-z0-9_.+-]*)=(?:(?P<host>\[[^\]]+\]|[^:\[\]]*):)?(?P<port>[0-9]{1,5})"
)


@attrs.frozen
class ListenChoice:
    """Addresses and ports that the operator set."""

    addresses: ListenAddresses
    advertise: str

    @property
    def names(self) -> tuple[str, ...]:
        """Host names that clients may use for this server, besides this machine's own names."""
        return tuple(name for name in (*self.addresses.hosts, self.advertise) if name and not is_wildcard(name))


def listen_options(command: Callable[..., None]) -> Callable[..., None]:
    """The options about listening, handed to `command` as one `ListenChoice` named `listen`."""

    @click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen at.")
    @click.option("--port", type=_PORT, help="TCP port; without it, or with 0, any free one.")
    @click.option("--http-port", type=_PORT, help="HTTP port; without it, or with 0, any free one.")
    @click.option(
        "--transport",
        "transports",
        multiple=True,
        metavar="NAME=[HOST:]PORT",
        help="Port, and address if another than --host, of any transport: tcp=0.0.0.0:5556. May be repeated.",
    )
    @click.option(
        "--without-transport",
        "without",
        multiple=True,
        metavar="NAME",
        help="Transport that does not listen, such as http. May be repeated.",
    )
    @click.option(
        "--advertise",
        default="",
        metavar="HOST",
        help="Name or address by which other machines reach this one, for the connection file. Default: found out.",
    )
    @functools.wraps(command)
    def packed(
        host: str,
        port: int | None,
        http_port: int | None,
        transports: tuple[str, ...],
        without: tuple[str, ...],
        advertise: str,
        **others: Any,
    ) -> None:
        given = [_listen_address(text) for text in transports]
        given += [
            (name, ListenAddress("", number))
            for name, number in (("tcp", port), ("http", http_port))
            if number is not None
        ]
        command(listen=ListenChoice(_listen_addresses(host, given, without), _host(advertise)), **others)

    return packed


def _listen_addresses(host: str, given: list[tuple[str, ListenAddress]], without: tuple[str, ...]) -> ListenAddresses:
    found = dict(given)
    if len(found) < len(given):
        twice = sorted(name for name in found if sum(name == other for other, _ in given) > 1)
        raise ConfigurationError(f"the port of {' and '.join(twice)} is given twice: once with --transport is enough")
    if both := sorted(found.keys() & {*without}):
        raise ConfigurationError(f"--without-transport {both[0]} leaves out a transport that is given a port")
    return ListenAddresses(host, found, frozenset(without))


def _listen_address(text: str) -> tuple[str, ListenAddress]:
    found = _LISTEN_ADDRESS.fullmatch(text)
    if found is None or int(found["port"]) > 65535:
        raise click.BadParameter(f"{text!r} must be NAME=PORT or NAME=HOST:PORT, such as tcp=0.0.0.0:5556")
    return found["name"], ListenAddress((found["host"] or "").strip("[]"), int(found["port"]))


def _host(text: str) -> str:
    if "/" in text or text.count(":") == 1:
        raise click.BadParameter(
            f"{text!r} must be a name or an address, without scheme and port", param_hint="--advertise"
        )
    return text.strip("[]")
