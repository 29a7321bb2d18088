"""`djinn doctor` names faults and their remedies."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner

from djinn_commands.servers import diagnosis
from djinn_commands.servers.diagnosis import ServerRow, check_servers, check_torch, check_versions, diagnose, versions
from djinn_commands.servers.step_costs import StepCosts, describe
from djinn_core import torch_private
from djinn_core.cli import main
from djinn_core.errors import AccessRefused


@pytest.fixture
def environ(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return {}


def findings_by_title(environ):
    return {finding.what: finding for finding in diagnose(environ).findings}


def test_doctor_passes_sound_installation(environ):
    done = CliRunner().invoke(main, ["doctor", "--json"], env=environ)
    found = json.loads(done.output)
    assert (done.exit_code, found["well"]) == (0, True)
    assert found["versions"]["djinn"].startswith("26.")
    assert {"name": "scheduler", "value": "sequential", "origin": "default"} in found["settings"]
    policy = next(row for row in found["settings"] if row["name"] == "placement_policy")
    assert policy["value"] == "cost_based over several executors, single on one"
    assert policy["origin"] == "default: cost_based is installed"
    assert {"cpu", "local"} <= {row["name"] for row in found["plugins"] if row["status"] == "active"}


def test_doctor_prints_text(environ):
    done = CliRunner().invoke(main, ["doctor", "--all"], env=environ | {"DJINN_SCHEDULER": "mine"})
    assert "environment DJINN_SCHEDULER" in " ".join(done.output.split())
    assert "All is well." in done.output
    brief = CliRunner().invoke(main, ["doctor"], env=environ | {"DJINN_SCHEDULER": "mine"}).output
    assert len(brief.splitlines()) < 6
    assert "All is well." in brief
    assert "Transport" not in brief, "facts of optional libraries are no problem"


def test_version_mismatch_does_not_name_token():
    refused = AccessRefused("tcp://a:1 refused: the client speaks protocol version 4 and this server version 3")
    row = diagnosis._server_row("tcp://a:1", refused)
    (finding,) = check_servers((row,))
    assert "protocol version 4" in finding.what
    assert "token" not in finding.mend


def test_doctor_names_outdated_torch(monkeypatch):
    monkeypatch.setattr(torch_private, "NEEDED", (*torch_private.NEEDED, "torch._C._no_such_function"))
    (finding,) = check_torch()
    assert "torch._C._no_such_function" in finding.what
    assert "Install a version of PyTorch" in finding.mend


@pytest.mark.parametrize(
    ("name", "version", "message"),
    [
        ("python", "3.10.1", "Python 3.10.1 is too old"),
        ("torch", "2.4.0", "torch 2.4.0 is too old"),
        ("djinn", "1.1.14", "another project of that name"),
        ("msgspec", "", "msgspec is not installed"),
        ("blake3", "0.4.1", "blake3 0.4.1 is too old"),
        ("djinn-tcp", "", "djinn-tcp is not installed"),
        ("djinn-tcp", "26.10.0", "djinn-tcp 26.10.0 does not work with djinn 26."),
        ("djinn-native", "26.10.0", "djinn-native 26.10.0 does not work with djinn 26."),
        ("djinn-server", "26.10.0", "djinn-server 26.10.0 does not work with djinn 26."),
    ],
)
def test_doctor_names_unsupported_versions(name, version, message):
    (finding,) = check_versions(versions() | {name: version})
    assert message in finding.what
    assert finding.mend


def test_doctor_lists_all_requirements():
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    needed = {re.match(r"[\w.-]+", requirement)[0] for requirement in project["dependencies"]}
    assert set(versions()) == needed | {"python", "djinn", "djinn-native", "djinn-server"}
    assert all(versions().values())


def test_client_only_machine_needs_server_address(environ, monkeypatch):
    monkeypatch.setattr(diagnosis, "find_spec", lambda _: None)
    environ |= {"DJINN_COMPILERS": "bogus", "DJINN_AUTHENTICATORS": "bogus", "DJINN_ASSIGNMENT": "bogus"}
    (finding,) = diagnose(environ).findings
    assert "No server is configured, and the package djinn-server" in finding.what
    assert "pip install ./djinn_server" in finding.mend
    assert not finding.fatal
    assert "djinn-server" not in str([*findings_by_title(environ | {"DJINN_SERVERS": "unix:///nonexistent.sock"})])


def test_an_unreachable_server_is_named(environ):
    found = diagnose(environ | {"DJINN_SERVERS": "unix:///nonexistent.sock", "DJINN_TOKEN": "hush"})
    assert not found.well
    (row,) = found.servers
    assert (row.url, row.reachable) == ("unix:///nonexistent.sock", False)
    assert "hush" not in repr(found)


def test_a_missing_connection_file_is_named(environ):
    (finding,) = findings_by_title(environ | {"DJINN_CONNECTION_FILE": "/nonexistent.json"}).values()
    assert "/nonexistent.json" in finding.what


def test_world_readable_token_file_is_a_note(environ, tmp_path):
    file = tmp_path / "djinn" / "config.toml"
    file.parent.mkdir()
    file.write_text('token = "hush"')
    file.chmod(0o644)
    found = diagnose(environ)
    assert found.well
    assert [finding.mend for finding in found.findings] == [f"Run `chmod 600 {file}`."]
    file.chmod(0o600)
    assert not diagnose(environ).findings


def test_unknown_variable_is_a_note(environ):
    found = findings_by_title(environ | {"DJINN_SERVRES": "tcp://x", "DJINN_CPU_MINE": "1"})
    assert not any("DJINN_CPU_MINE" in what for what in found)  # a variable of the plugin `cpu`
    assert "Did you mean DJINN_SERVERS?" in [finding.mend for finding in found.values()]


def test_missing_requested_plugin_is_fatal(environ):
    found = diagnose(environ | {"DJINN_PLUGINS": "nosuch"})
    assert not found.well
    assert "remove it from the setting `plugins`" in found.findings[0].mend


def test_one_reachable_address_is_enough():
    good = ServerRow("tcp://a:1", reachable=True, detail="djinn 26, cpu:0")
    bad = ServerRow("http://a:2", reachable=False, detail="no server answers at http://a:2", mend="Start it.")
    assert [finding.fatal for finding in check_servers((good, bad))] == [False]
    assert [(finding.what, finding.fatal) for finding in check_servers((bad,))] == [(bad.detail, True)]


def test_piped_output_is_not_wrapped(environ):
    url = "unix:///a/rather/long/path/that/no/line/of/eighty/columns/will/ever/hold/nonexistent.sock"
    done = CliRunner().invoke(main, ["doctor"], env=environ | {"DJINN_SERVERS": url, "DJINN_TOKEN": "hush"})
    assert done.exit_code == 1
    assert f"Server {url}: not reachable, see below" in done.output
    assert "`djinn explain-error transport` shows causes and solutions" in done.output
    assert "All is well" not in done.output


def test_unknown_executor_choices_are_named(environ):
    found = findings_by_title(environ | {"DJINN_COMPILERS": "nothing"})
    finding = found["The setting `compilers` names 'nothing', which no plugin in use offers."]
    assert finding.fatal
    assert "inductor" in finding.mend


def test_failing_transport_omits_its_line_only(environ, monkeypatch):
    def raise_no_library(_):
        raise RuntimeError("no library")

    monkeypatch.setattr("djinn_tcp.transport.TcpTransport.facts", raise_no_library)
    assert diagnose(environ).transports["tcp"] == "failed: RuntimeError('no library')"


def test_measure_reports_break_even_step(environ):
    done = CliRunner().invoke(main, ["doctor", "--json", "--measure"], env=environ)
    assert done.exit_code == 0, done.output
    costs = json.loads(done.output)["step_costs"]
    assert costs.keys() == {"read", "record", "here", "there"}
    assert costs["record"] > 0
    assert costs["there"] > 0


def test_costs_of_a_step_name_device_time_and_local_time():
    costs = StepCosts(read=0.05, record=0.001, here=0.02, there=0.01)
    assert (costs.min_step_seconds, costs.break_even_seconds) == (pytest.approx(0.5), pytest.approx(0.1))
    text = "\n".join(describe(costs))
    assert "If a step takes less than 500 ms on the device, a read costs more than 10%" in text
    assert "Steps that take more than 100.0 ms on this machine are faster on the device" in text


def test_device_without_speedup_has_no_break_even():
    costs = StepCosts(read=0.05, record=0.001, here=0.01, there=0.01)
    assert costs.break_even_seconds is None
    assert "not faster than this machine" in describe(costs)[-1]
