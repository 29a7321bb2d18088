"""Load on servers: one row after the other, and a JSON object of all on the last line.

    python -m evaluation load                                  # about half an hour
    python -m evaluation load --only clients --minutes 1       # one row, and shorter

Each row is a program that its module documents. A row whose verdict is not 1 fails the run.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence

import attrs


@attrs.frozen
class Row:
    """A program, its arguments, and the name of the figure that must be 1."""

    program: str
    arguments: Sequence[str] = ()
    verdict: str = ""


def rows_of(options: argparse.Namespace) -> dict[str, Row]:
    """Return the rows by name, with durations from `options`."""
    clients = ["--clients", str(options.clients), "--tenants", str(options.tenants), "--minutes", str(options.minutes)]
    return {
        "clients": Row("many_clients", clients, "many_clients_fair_and_right"),
        "sessions": Row("leaving", ["--sessions", str(options.sessions)], "nothing_left_behind"),
        "work": Row(
            "long_work",
            ["--steps", str(options.steps), "--programs", str(options.steps // 10)],
            "long_work_keeps_nothing",
        ),
    }


def run(row: Row) -> dict[str, object]:
    """Return the JSON object that a row prints, or its exit status if it prints none."""
    command = [sys.executable, "-W", "ignore", "-m", f"evaluation.load.{row.program}", *row.arguments, "--json"]
    process = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    lines = process.stdout.strip().splitlines()
    try:
        report = json.loads(lines[-1])
    except (IndexError, ValueError):
        return {"exit_status": process.returncode, "said": lines[-1] if lines else ""}
    return dict(report)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="names of rows, separated by commas")
    parser.add_argument("--minutes", type=float, default=10.0, help="of many clients")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--tenants", type=int, default=8)
    parser.add_argument("--sessions", type=int, default=1000)
    parser.add_argument(
        "--steps", type=int, default=20_000, help="decode steps of long work, which also runs a tenth as many programs"
    )
    parser.add_argument("--json", action="store_true", help="no effect, because JSON is always printed")
    options = parser.parse_args(arguments)
    rows = rows_of(options)
    required = options.only.split(",") if options.only else list(rows)
    results: dict[str, object] = {}
    for name in required:
        visited = results[name] = run(rows[name])
        print(f"{name}: {visited}", flush=True)
    good = all(isinstance(s := results[name], dict) and s.get(rows[name].verdict) == 1 for name in required)
    print(json.dumps(results | {"load_survived": int(good)}))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
