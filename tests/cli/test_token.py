"""`djinn token limit` is about tenants that there are."""

from __future__ import annotations

from click.testing import CliRunner

from djinn_core.errors import ConfigurationError
from djinn_server.cli.token import command


def test_token_limit_of_unknown_tenant_fails(tmp_path):
    table = ["--file", str(tmp_path / "tokens.json")]
    run = CliRunner().invoke
    assert run(command, ["create", "alice", *table]).exit_code == 0
    refused = run(command, ["limit", "bob", "--sessions", "1", *table])
    assert isinstance(refused.exception, ConfigurationError)
    assert "has no token of a tenant 'bob'" in str(refused.exception)
    assert "djinn token create bob" in str(refused.exception)
    assert run(command, ["limit", "alice", "--sessions", "1", *table]).exit_code == 0
    assert run(command, ["revoke", "alice", *table]).exit_code == 0
    assert run(command, ["limit", "alice", *table]).exit_code == 0, "a limit that is left over can be lifted"
