"""Configured servers: their addresses, tokens and TLS identities."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final

import attrs

from djinn_client.runtime.connecting.logins import find_login, is_login_name
from djinn_core.errors import ConfigurationError
from djinn_core.hookspecs.transports import TlsOptions, Transport
from djinn_core.protocol.addresses import has_transport, transport_for
from djinn_core.protocol.connection_file import ConnectionFile, read_connection_file
from djinn_core.protocol.tls_transports import travels_bare, with_tls
from djinn_core.settings import Settings

ENGINE: Final = "engine"  # among `standby`: what has started an executor starts another one, wherever it has a place


@attrs.frozen
class Servers:
    """Addresses of servers and the token for them: `members` are the addresses of each server.

    `tls`: whom to take for them, where their addresses say that TLS is spoken.
    """

    members: tuple[tuple[str, ...], ...]
    token: str = attrs.field(repr=False)
    tls: TlsOptions = attrs.field(factory=TlsOptions)

    def transports(self, plain: Iterable[Transport]) -> tuple[Transport, ...]:
        """The ways to these servers.

        Raises:
            ConfigurationError: it is said whose certificate to take, and an address on the network is one without TLS.
        """
        known = tuple(plain)
        if self.tls.fingerprints or self.tls.authority is not None:
            bare = [url for url in self.urls if travels_bare(url, known)]
            if bare:
                raise ConfigurationError(
                    f"{', '.join(bare)}: there is no TLS at this address, but tls_fingerprints or tls_authority says whose "
                    "certificate to take. Write tcps:// or https://, as `djinn serve` prints it, or unset them"
                )
        return with_tls(known, self.tls)

    @property
    def urls(self) -> tuple[str, ...]:
        """All addresses."""
        return tuple(url for urls in self.members for url in urls)


def find_servers(settings: Settings, transports: Iterable[Transport] = ()) -> Servers | None:
    """The configured servers, from `servers`, whose log-ins or addresses they are, or from the connection file; None if there are none.

    Raises:
        ConfigurationError: the connection file or a log-in cannot be read, or no token is configured.
        PluginError: there is no token, and none of `transports`, where they are known, serves any of the addresses.
    """
    named = [one for one in settings.servers if is_login_name(one)]
    if named:
        return _logged_in(settings, named)
    file = None
    if settings.connection_file is not None and not (settings.servers and settings.token):
        file = read_connection_file(settings.connection_file)
    if settings.servers:
        token = settings.token or _token_for(settings.servers, file, transports)
        return Servers(tuple((url,) for url in settings.servers), token, _tls(settings, file))
    if file is not None:
        return Servers((file.urls,), settings.token or file.token, _tls(settings, file))
    return None


def _logged_in(settings: Settings, names: list[str]) -> Servers:
    """The servers of these log-ins. Their own tokens and certificates count, not those of the settings."""
    contents = [find_login(name).content for name in names]
    if len(names) < len(settings.servers) or len({one.token for one in contents}) > 1:
        raise ConfigurationError(
            f"{', '.join(settings.servers)}: servers work as one where they take the same token. Name one log-in, several with "
            "the same token, or addresses alone with the setting `token`"
        )
    fingerprints = tuple(dict.fromkeys(one.fingerprint for one in contents if one.fingerprint))
    tls = attrs.evolve(_tls(settings, None), fingerprints=fingerprints or settings.tls_fingerprints)
    return Servers(tuple(one.urls for one in contents), contents[0].token, tls)


def server_tls(settings: Settings) -> TlsOptions:
    """TLS options of the settings alone."""
    return _tls(settings, None)


def _tls(settings: Settings, file: ConnectionFile | None) -> TlsOptions:
    """TLS options from the settings, or the connection file's fingerprint where the settings name no certificate."""
    fingerprints = settings.tls_fingerprints
    if not fingerprints and settings.tls_authority is None and file is not None and file.fingerprint:
        fingerprints = (file.fingerprint,)
    return TlsOptions(settings.tls_certificate, settings.tls_key, settings.tls_authority, fingerprints)


def _token_for(urls: tuple[str, ...], file: ConnectionFile | None, transports: Iterable[Transport]) -> str:
    """The file's token, but only for servers that the file is about: a token is not shown to other servers."""
    if file is not None and set(urls) <= set(file.urls):
        return file.token
    known = with_tls(transports, TlsOptions())
    if known and not any(has_transport(url, known) for url in urls):
        transport_for(urls[0], known)  # says what is wrong with the address, which a token would not mend
    raise ConfigurationError(
        f"no token for {', '.join(urls)}: set DJINN_TOKEN, `djinn login` and name the log-in, or copy the "
        "connection file that `djinn serve` wrote and set DJINN_CONNECTION_FILE to it instead of naming servers"
    )


def standby_servers(settings: Settings, usual: TlsOptions) -> list[Servers]:
    """Those that take sessions over; `usual` says whom to take for them where their connection file does not.

    Raises:
        ConfigurationError: a connection file cannot be read, or there is no token for an address.
    """
    found: list[Servers] = []
    for one in settings.standby:
        if one == ENGINE:
            continue
        if "://" in one:
            if not settings.token:
                raise ConfigurationError(
                    f"no token for the standby server {one}: set DJINN_TOKEN, or name its connection file instead"
                )
            found.append(Servers(((one,),), settings.token, usual))
        else:
            file = read_connection_file(Path(one).expanduser())
            tls = attrs.evolve(usual, fingerprints=(file.fingerprint,)) if file.fingerprint else usual
            found.append(Servers((file.urls,), file.token, tls))
    return found
