"""Commands for stored servers: `djinn login`, `djinn logout` and `djinn servers`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import click

from djinn_core.errors import ConfigurationError, DjinnError, TransportError

if TYPE_CHECKING:
    from djinn_core.protocol.connection_file import ConnectionFile

PATIENCE = 10.0  # timeout in seconds for each address


@click.command(name="login")
@click.argument("server")
@click.option("--name", help="Name of the log-in. Default: the server's host name.")
@click.option(
    "--token-file",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="File whose first line is the token. Without a file, the command asks for the token, or reads it from standard input if there is no terminal.",
)
@click.option("--fingerprint", default="", help="Fingerprint of the server's certificate, if no authority signed it.")
def login(server: str, name: str | None, token_file: Path | None, fingerprint: str) -> None:
    """Store the address and token of SERVER under a name.

    SERVER is an address such as tcps://gpu-box:5556, several addresses joined by commas, or a file that `djinn serve` wrote.

    The server must accept the token. If no authority signed its certificate, you first confirm the certificate's fingerprint.
    Afterwards, `--server`, the setting `servers` and DJINN_SERVERS accept the name in place of an address.
    """
    import msgspec

    from djinn_client.runtime.connecting.logins import Login, is_login_name
    from djinn_commands.servers.logins import save_login
    from djinn_core.protocol.connection_file import ConnectionFile, read_connection_file

    if "://" in server:
        content = ConnectionFile(tuple(server.split(",")), _token(token_file), _fingerprint(fingerprint))
    elif (file := Path(server).expanduser()).exists():
        content = read_connection_file(file)
    else:
        raise ConfigurationError(
            f"{server!r} is neither an existing file nor an address: begin an address with its scheme, as in tcps://{server}"
        )
    host = urlsplit(content.urls[0]).hostname or "" if content.urls else ""
    login_name = name or host
    if not is_login_name(login_name):
        raise ConfigurationError(f"{login_name!r} cannot be the name of a log-in: choose another name with --name NAME")
    try:
        welcome = _check(content)
    except TransportError as error:
        if not _is_unknown_certificate(error):
            raise
        content = msgspec.structs.replace(content, fingerprint=_confirmed_fingerprint(content, error))
        welcome = _check(content)
    path = save_login(Login(login_name, content))
    click.echo(
        f"Stored the server {welcome} as {login_name!r}. Use it with --server {login_name} or DJINN_SERVERS={login_name}"
    )
    click.echo(f"The token is in {path}, which only you can read. `djinn logout {login_name}` removes it", err=True)


def _token(file: Path | None) -> str:
    """Read the token from the file, the terminal, or standard input, but not from an argument, which others can read.

    Raises:
        ConfigurationError: the token is empty.
    """
    if file is not None:
        lines = file.read_text(errors="replace").splitlines()
    elif has_terminal():
        lines = [click.prompt("Token", hide_input=True)]
    else:
        lines = sys.stdin.readline().splitlines()
    token = lines[0].strip() if lines else ""
    if not token:
        raise ConfigurationError("the token is empty: type it, send it on standard input, or name --token-file FILE")
    return token


def _fingerprint(text: str) -> str:
    """Return `text` in the notation of connection files. If it is empty, return the fingerprint of the settings, or an empty string.

    Raises:
        ConfigurationError: the settings have several fingerprints, or `text` is invalid.
    """
    from djinn_core.settings import resolve

    fingerprints = resolve({"tls_fingerprints": text} if text else None).settings.tls_fingerprints
    if len(fingerprints) > 1:
        raise ConfigurationError(
            "the setting `tls_fingerprints` has several fingerprints: choose this server's with --fingerprint"
        )
    return fingerprints[0] if fingerprints else ""


def _check(content: ConnectionFile) -> str:
    """Return the first address at which the server accepts the token.

    Raises:
        DjinnError: no address accepts the token.
    """
    import attrs

    from djinn_client.runtime.connecting.servers import ask_servers
    from djinn_core.settings import resolve

    options: dict[str, object] = {"servers": content.urls, "token": content.token}
    if content.fingerprint:
        options["tls_fingerprints"] = content.fingerprint
    settings = resolve(options).settings
    limited_settings = attrs.evolve(
        settings, connection_file=None, connect_timeout=min(settings.connect_timeout, PATIENCE)
    )
    replies = ask_servers(limited_settings)
    errors = [reply for reply in replies.values() if isinstance(reply, DjinnError)]
    for url, reply in replies.items():
        if not isinstance(reply, DjinnError):
            return url
    if errors:
        raise errors[0]
    raise ConfigurationError("the connection file has no address: copy it from the server again")


def _is_unknown_certificate(error: BaseException | None) -> bool:
    """Return True if `error` or one of its causes is a certificate that no authority known to this machine signed."""
    import ssl

    while error is not None and not isinstance(error, ssl.SSLCertVerificationError):
        error = error.__cause__
    return error is not None


def _confirmed_fingerprint(content: ConnectionFile, error: TransportError) -> str:
    """Ask the user to confirm the fingerprint of the server's certificate, and return it. Send the server no token.

    Raises:
        TransportError: there is no certificate or no terminal, or the user rejects the fingerprint.
    """
    fingerprint = _shown_fingerprint(content)
    if not fingerprint:
        raise error
    host = urlsplit(content.urls[0]).hostname
    if not has_terminal():
        raise TransportError(
            f"{error}. The certificate of {host} has the fingerprint {fingerprint}. If `djinn serve` printed the same there, repeat the command "
            f"with --fingerprint {fingerprint}"
        ) from error
    click.echo(
        f"No authority known to this machine signed the certificate of {host}. The certificate has the fingerprint\n  {fingerprint}"
    )
    if not click.confirm("Did `djinn serve` print the same fingerprint as `Certificate` on the server?"):
        raise TransportError(
            f"you did not accept the certificate of {host}: no token was sent or stored. Ask the server's operator for its fingerprint"
        ) from error
    return fingerprint


def _shown_fingerprint(content: ConnectionFile) -> str:
    """Return the fingerprint of the certificate that the server presents, or an empty string if it presents none."""
    import msgspec

    from djinn_core.protocol.net.tls_contexts import FINGERPRINT, UnexpectedCertificate

    cause: BaseException | None
    try:
        _check(msgspec.structs.replace(content, fingerprint=FINGERPRINT + "0" * 64))
    except DjinnError as error:
        cause = error
        while cause is not None and not isinstance(cause, UnexpectedCertificate):
            cause = cause.__cause__
        return cause.fingerprint if cause is not None else ""
    return ""


def has_terminal() -> bool:
    """Return True if standard input is a terminal, so that Djinn can ask the user."""
    return sys.stdin.isatty()


@click.command(name="logout")
@click.argument("name")
def logout(name: str) -> None:
    """Remove the log-in NAME from this machine. Its token remains valid until the server's operator revokes it."""
    from djinn_commands.servers.logins import forget_login

    forget_login(name)
    click.echo(f"removed the log-in {name}")


@click.command(name="servers")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list with one object per log-in.")
def servers(as_json: bool) -> None:
    """List the servers that you have logged in to."""
    import msgspec
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from djinn_commands.servers.logins import list_logins

    logins = list_logins()
    if as_json:
        rows = [{"name": one.name, "urls": one.content.urls, "fingerprint": one.content.fingerprint} for one in logins]
        click.echo(msgspec.json.format(msgspec.json.encode(rows)).decode())
    elif not logins:
        click.echo("no log-ins: store one with `djinn login ADDRESS`")
    else:
        table = Table("name", "addresses", "certificate", box=None, pad_edge=False)
        for one in logins:
            fingerprint = one.content.fingerprint[:23] + "..." if one.content.fingerprint else ""
            table.add_row(one.name, Text(", ".join(one.content.urls)), fingerprint)
        Console().print(table)
