"""`djinn token`: manage access tokens, their expiry times and quotas."""

from __future__ import annotations

import datetime as dt
import difflib
import re
from pathlib import Path

import click
import msgspec
from rich.console import Console
from rich.table import Table

from djinn_core.errors import ConfigurationError
from djinn_core.system.directories import state_directory
from djinn_server.hookspecs.authenticators import OPERATOR
from djinn_server.hookspecs.quotas import Quota
from djinn_server.launch.token_table import (
    TokenRow,
    TokenTable,
    change_table,
    check_tenant,
    create,
    read_table,
)

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_GIB = 2**30
_file = click.option(
    "--file",
    type=click.Path(path_type=Path, dir_okay=False),
    default=None,
    help="The table of tokens, as given to `djinn serve --token-file`. Default: tokens.json in your state directory.",
)


def _duration(text: str) -> float:
    """Convert a duration such as `30d`, `12h`, `90m` or `never` to seconds; `never` gives 0."""
    if text == "never":
        return 0.0
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smhdw])", text)
    if match is None or not float(match.group(1)):
        raise click.BadParameter(f"{text!r} is not a duration: write 30d, 12h, 90m, 45s, 2w or never")
    return float(match.group(1)) * _SECONDS[match.group(2)]


@click.group(name="token")
def command() -> None:
    """Create, list and revoke tokens of tenants, and limit tenants. A server isolates the work of each tenant.

    A server that uses the table applies changes at once.
    """


@command.command(name="create")
@click.argument("tenant")
@click.option(
    "--expires", type=_duration, default="90d", show_default=True, help="Lifetime of the token: 30d, 12h or never."
)
@click.option("--monitor", is_flag=True, help="The token gives access to status, metrics and health only.")
@_file
def create_token(tenant: str, expires: float, monitor: bool, file: Path | None) -> None:
    """Create a token for TENANT. The token is printed once. The table stores only its digest."""
    path = _path(file)
    with change_table(path) as change:
        change.table, row, token = create(change.table, tenant, expires, monitor)
    click.echo(token)
    until = "for ever" if not row.expires else f"until {_date(row.expires)}"
    click.echo(f"Token {row.id} of {tenant} is valid {until}. Serve with: djinn serve --token-file {path}", err=True)
    if tenant == OPERATOR:
        click.echo(f"{tenant} is the operator: any client with this token sees the sessions of all tenants", err=True)


@command.command(name="list")
@click.option("--json", "as_json", is_flag=True, help="As JSON: an object with `tokens` and `quotas`.")
@_file
def list_tokens(as_json: bool, file: Path | None) -> None:
    """List the tokens, without their secrets."""
    token_table = read_table(_path(file))
    if as_json:
        rows = [
            {key: value for key, value in msgspec.to_builtins(row).items() if key != "digest"}
            for row in token_table.tokens
        ]
        quotas = {tenant: msgspec.to_builtins(quota) for tenant, quota in token_table.quotas.items()}
        click.echo(msgspec.json.format(msgspec.json.encode({"tokens": rows, "quotas": quotas})).decode())
        return
    table = Table("token", "tenant", "good for", "made", "expires", box=None, pad_edge=False)
    for row in token_table.tokens:
        table.add_row(row.id, row.tenant, "watching" if row.monitor else "everything", _date(row.created), _expiry(row))
    Console().print(table if token_table.tokens else "There are no tokens.")
    for tenant, quota in token_table.quotas.items():
        limits = ", ".join(f"{name} {value:,}" for name, value in msgspec.to_builtins(quota).items())
        click.echo(f"{tenant} may use at most: {limits}")


@command.command(name="revoke")
@click.argument("which")
@_file
def revoke(which: str, file: Path | None) -> None:
    """Revoke the token with the id WHICH, or all tokens of the tenant WHICH. Their sessions end within seconds."""
    path = _path(file)
    read_table(path)
    with change_table(path) as change:
        remaining = tuple(row for row in change.table.tokens if which not in {row.id, row.tenant})
        revoked = len(change.table.tokens) - len(remaining)
        if not revoked:
            raise ConfigurationError(
                f"{path} has no token and no tenant {which!r}: `djinn token list` shows its tokens"
            )
        change.table = msgspec.structs.replace(change.table, tokens=remaining)
    click.echo(f"{revoked} {'token' if revoked == 1 else 'tokens'} revoked")


@command.command(name="limit")
@click.argument("tenant")
@click.option("--sessions", type=click.IntRange(0), default=0, help="Concurrent sessions.")
@click.option("--values", type=click.IntRange(0), default=0, help="Live tensors.")
@click.option("--memory-gib", type=click.FloatRange(0), default=0.0, help="Memory quota of the tenant's tensors.")
@click.option("--seconds-an-hour", type=click.FloatRange(0), default=0.0, help="Time on the device within an hour.")
@click.option("--disk-gib", type=click.FloatRange(0), default=0.0, help="Disk quota of the tenant.")
@click.option("--connections-a-minute", type=click.IntRange(0), default=0, help="Connections to the server.")
@click.option("--requests-a-second", type=click.IntRange(0), default=0, help="Messages. Further messages are delayed.")
@_file
def limit(
    tenant: str,
    sessions: int,
    values: int,
    memory_gib: float,
    seconds_an_hour: float,
    disk_gib: float,
    connections_a_minute: int,
    requests_a_second: int,
    file: Path | None,
) -> None:
    """Limit what TENANT may use of each executor. Options that are left out set no limit."""
    quota = Quota(sessions, values, int(memory_gib * _GIB), seconds_an_hour, int(disk_gib * _GIB))
    quota = msgspec.structs.replace(
        quota, connections_a_minute=connections_a_minute, requests_a_second=requests_a_second
    )
    path = _path(file)
    with change_table(path) as change:
        _check_known(check_tenant(tenant), change.table, path)
        other_quotas = {name: other_quota for name, other_quota in change.table.quotas.items() if name != tenant}
        new_quota = {tenant: quota} if quota != Quota() else {}
        change.table = msgspec.structs.replace(change.table, quotas=other_quotas | new_quota)
    click.echo(f"the limits of {tenant} are set" if new_quota else f"{tenant} has no limits")


def _check_known(tenant: str, table: TokenTable, path: Path) -> None:
    """Raise `ConfigurationError` if a tenant has neither tokens nor limits, because its name may be mistyped."""
    known_tenants = {row.tenant for row in table.tokens} | table.quotas.keys() | {OPERATOR}
    if tenant in known_tenants:
        return
    close = difflib.get_close_matches(tenant, known_tenants, 1)
    guess = f"did you mean {close[0]!r}? Otherwise create" if close else "create"
    raise ConfigurationError(
        f"{path} has no token of a tenant {tenant!r}: {guess} one first, with `djinn token create {tenant} --file {path}`"
    )


def _path(file: Path | None) -> Path:
    return file or state_directory() / "tokens.json"


def _date(seconds: float) -> str:
    return dt.datetime.fromtimestamp(seconds, dt.UTC).strftime("%Y-%m-%d %H:%M UTC")


def _expiry(row: TokenRow) -> str:
    if not row.expires:
        return "never"
    return _date(row.expires) + (" (expired)" if row.expired(dt.datetime.now(dt.UTC).timestamp()) else "")
