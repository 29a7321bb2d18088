"""`djinn login`: keeps a server's address, token and certificate under a name."""

from __future__ import annotations

import sys
from pathlib import Path
from urllib.parse import urlsplit

import attrs
import click

from djinn_client.runtime.connecting.logins import Login, is_login_name, save_login
from djinn_core.errors import ConfigurationError, DjinnError
from djinn_core.protocol.connection_file import ConnectionFile, read_connection_file

PATIENCE = 10.0  # seconds for each address


@click.command(name="login")
@click.argument("server")
@click.option("--name", help="Name of the log-in; without it, the server's host name.")
@click.option(
    "--token-file",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="File whose first line is the token. Without it, you are asked; where there is no terminal, standard input is read.",
)
@click.option(
    "--fingerprint", default="", help="Fingerprint of the server's certificate, where no authority signed it."
)
def command(server: str, name: str | None, token_file: Path | None, fingerprint: str) -> None:
    """Keep SERVER under a name: an address such as tcps://gpu-box:5556, or a file that `djinn serve` wrote.

    The server is asked if it accepts the token. From then on, `--server NAME`, the setting `servers` and DJINN_SERVERS take the
    name in place of an address.
    """
    if "://" in server:
        content = ConnectionFile((server,), _token(token_file), _fingerprint(fingerprint))
    else:
        content = read_connection_file(Path(server).expanduser())
    host = urlsplit(content.urls[0]).hostname or "" if content.urls else ""
    called = name or host
    if not is_login_name(called):
        raise ConfigurationError(
            f"the server has no host name that could be the log-in's ({called!r}): give --name NAME"
        )
    accepted = _check(content)
    path = save_login(Login(called, content))
    click.echo(f"Logged in to {accepted} as {called!r}: use it with --server {called} or DJINN_SERVERS={called}")
    click.echo(f"The token is in {path}, which only you can read; `djinn logout {called}` removes it", err=True)


def _token(file: Path | None) -> str:
    """The token, never from the command line, which other users can read."""
    if file is not None:
        lines = file.read_text(errors="replace").splitlines()
    elif sys.stdin.isatty():
        lines = [click.prompt("Token", hide_input=True)]
    else:
        lines = sys.stdin.readline().splitlines()
    token = lines[0].strip() if lines else ""
    if not token:
        raise ConfigurationError("no token was given: type it, pass it on standard input, or name --token-file FILE")
    return token


def _fingerprint(given: str) -> str:
    """A fingerprint as it is written in connection files; without one, that of the settings, if there is one."""
    from djinn_core.settings import resolve

    found = resolve({"tls_fingerprints": given} if given else None).settings.tls_fingerprints
    if len(found) > 1:
        raise ConfigurationError("there are several fingerprints: give the one of this server with --fingerprint")
    return found[0] if found else ""


def _check(content: ConnectionFile) -> str:
    """The first address at which the server accepts the token.

    Raises:
        DjinnError: none does.
    """
    from djinn_client.runtime.connecting.status import ask_servers
    from djinn_core.settings import resolve

    given: dict[str, object] = {"servers": content.urls, "token": content.token}
    if content.fingerprint:
        given["tls_fingerprints"] = content.fingerprint
    settings = resolve(given).settings
    patient = attrs.evolve(settings, connection_file=None, connect_timeout=min(settings.connect_timeout, PATIENCE))
    replies = ask_servers(patient)
    errors = [reply for reply in replies.values() if isinstance(reply, DjinnError)]
    for url, reply in replies.items():
        if not isinstance(reply, DjinnError):
            return url
    if errors:
        raise errors[0]
    raise ConfigurationError("the connection file names no address: copy it again from the server")
