"""The rows of `python -m evaluation load`, in short."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from evaluation.load import run_load as load
from evaluation.load.many_clients import figures_of

FOLDER = Path(load.__file__).parent


def test_load_of_many_clients_gets_right_results(python, served_environment, url_of):
    command = ["-W", "ignore", "-m", "evaluation.load.many_clients", "--clients", "2", "--minutes", "0.01"]
    done = python.run(*command, "--at", url_of("tcp"), "--json", env=served_environment)
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert found["client_failures"] == 0, found["first_failure"]
    assert found["wrong_results"] == 0
    assert found["requests"] > 0


def test_load_counts_wrong_results():
    one = {"requests": 10, "wrong": 0, "seconds": [0.1] * 10, "failure": ""}
    assert figures_of([one, one], {}, {}, 1.0)["many_clients_fair_and_right"] == 1
    for other in ({"wrong": 1}, {"requests": 3}, {"failure": "it broke"}):
        assert figures_of([one, one | other], {}, {}, 1.0)["many_clients_fair_and_right"] == 0, other


def test_load_report_has_rows_and_verdicts(monkeypatch, capsys):
    options = argparse.Namespace(clients=1, tenants=1, minutes=1, sessions=1, steps=10)
    rows = load.rows_of(options)
    assert all(row.verdict in (FOLDER / f"{row.program}.py").read_text() for row in rows.values())
    monkeypatch.setattr(load, "run", lambda row: {row.verdict: int("long_work" not in row.program)})
    assert load.main(["--only", "clients,sessions"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["load_survived"] == 1
    assert load.main([]) == 1
