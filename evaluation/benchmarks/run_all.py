"""Run all benchmarks, and draw a picture: `make bench`, `make bench ARGS=--quick`.

Arguments are passed to every script; with `--json` the last line is one object with all values. Figures are in
`evaluation/benchmarks/results` (or `--save`), which git ignores; `plot.py` reads them. Each run adds a line to
`history.jsonl`, and regressions since the last release are printed at the end (`history.py`).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import djinn
from evaluation import ROOT
from evaluation.benchmarks import history

HERE = Path(__file__).resolve().parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--save", default=str(HERE / "results"))
    parser.add_argument("--only", default="", help="names of scripts without `bench_`, such as models,links")
    parser.add_argument("--history", type=Path, default=history.FILE, help="the file of all runs")
    options, rest = parser.parse_known_args()
    scripts = sorted(HERE.glob("bench_*.py"))
    if options.only:
        required = {f"bench_{name}" for name in options.only.split(",")}
        scripts = [script for script in scripts if script.stem in required]
    broken, results = [], Path(options.save)
    old = {script: _result_time_ns(results, script) for script in scripts}
    for script in scripts:
        print(f"\n== {script.name}", flush=True)
        command = [sys.executable, "-W", "ignore", str(script), "--save", options.save, *rest]
        if subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=False).returncode:
            broken.append(script.name)
    print(flush=True)
    if importlib.util.find_spec("matplotlib") is None:
        print("no picture: `pip install matplotlib`, then `python -m evaluation.benchmarks.plot`")
    else:
        subprocess.run([sys.executable, str(HERE / "plot.py"), "--results", options.save], check=False)
    values = values_in(results, [script for script in scripts if _result_time_ns(results, script) != old[script]])
    if "--small" not in rest:  # a run with `--small` measures nothing
        run = history.this_run(djinn.__version__, " ".join(rest), values)
        print(history.report(history.read(options.history), run))
        history.add(options.history, run)
    if options.json:
        print(json.dumps(values))
    if broken:
        sys.exit(f"broken: {', '.join(broken)}")


def _result_time_ns(folder: Path, script: Path) -> int:
    """Return the time at which a script last wrote results, in nanoseconds, or 0. It tells new from earlier results."""
    file = folder / f"{script.stem}.json"
    return file.stat().st_mtime_ns if file.exists() else 0


def values_in(folder: Path, scripts: list[Path]) -> dict[str, float]:
    """Return every case's value by subject and name."""
    values = {}
    for script in scripts:
        file = folder / f"{script.stem}.json"
        if file.exists():
            for case in json.loads(file.read_text())["cases"]:
                values[f"{script.stem.removeprefix('bench_')}.{case['name']}"] = case["value"]
    return values


if __name__ == "__main__":
    main()
