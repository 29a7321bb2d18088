"""Picture and table of the results in `evaluation/benchmarks/results`, for the documents.

    python -m evaluation.benchmarks.plot [--results folder] [--picture evaluation/results/benchmarks.svg] [--page
        evaluation/results/benchmarks.md]

Each line is a case with a bar: its value relative to the bar, which is 1. Needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from evaluation import ROOT

RESULTS = ROOT / "evaluation" / "results"
BEGIN, END = "<!-- results: written by evaluation/benchmarks/plot.py -->", "<!-- end of results -->"
MET, MISSED = "#2a7f62", "#c0392b"
LEAST = 0.01  # smaller values are drawn here

Rows = list[dict[str, Any]]


def rows_in(folder: Path) -> Rows:
    """Return a row for every case of the results in a folder, with its subject."""
    rows = []
    for file in sorted(folder.glob("bench_*.json")):
        report = json.loads(file.read_text())
        common_fields = {"subject": file.stem.removeprefix("bench_"), "small": report["effort"]["small"]}
        rows += [common_fields | case for case in report["cases"]]
    return rows


def draw(rows: Rows, picture: Path) -> None:
    """Draw each case's value divided by its bar, on a logarithmic axis, into the file `picture`."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "djinn"  # deterministic output
    from matplotlib import pyplot as plt

    barred = [row for row in rows if row["bar"]]
    figure, axes = plt.subplots(figsize=(9, 0.32 * len(barred) + 1.2))
    for place, row in enumerate(reversed(barred)):
        share = max(row["value"] / row["bar"], LEAST)
        colour = MET if row["value"] <= row["bar"] else MISSED
        axes.plot([1, share], [place, place], color=colour, linewidth=1)
        axes.plot(share, place, "o", color=colour)
        axes.annotate(format_value(row, "value"), (share, place), textcoords="offset points", xytext=(0, 5), fontsize=7)
    names = [
        f"{row['subject']}: {row['name'].replace('_', ' ')} (≤ {format_value(row, 'bar')})" for row in reversed(barred)
    ]
    axes.set_yticks(range(len(barred)), names, fontsize=8)
    axes.set_xscale("log")
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xlabel("measured value divided by its bar (left of the line is better)")
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, metadata={"Date": None} if picture.suffix == ".svg" else None)


def format_value(row: dict[str, Any], key: str) -> str:
    number = f"{row[key]:.3g}" if abs(row[key]) < 1000 else f"{row[key]:,.0f}"
    return number if row["unit"] in {"x", ""} else f"{number} {row['unit']}"


def table(rows: Rows) -> str:
    """Return a Markdown table: every case, its figures, and the verdict."""
    lines = ["| subject | case | value | at most | | made of |", "| --- | --- | --- | --- | --- | --- |"]
    for row in rows:
        verdict = "" if row["bar"] is None else "met" if row["value"] <= row["bar"] else "**missed**"
        bar = "" if row["bar"] is None else format_value(row, "bar")
        parts = ", ".join(f"{name} {value:,.4g}" for name, value in row["figures"].items())
        lines.append(
            f"| {row['subject']} | {row['name'].replace('_', ' ')} | {format_value(row, 'value')} | {bar} | {verdict} | {parts} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=Path(__file__).with_name("results"))
    parser.add_argument("--picture", type=Path, default=RESULTS / "benchmarks.svg")
    parser.add_argument("--page", type=Path, default=RESULTS / "benchmarks.md")
    options = parser.parse_args()
    rows = rows_in(options.results)
    if not any(row["bar"] for row in rows) or any(row["small"] for row in rows):
        raise SystemExit(f"{options.results} has no bars, or rows of a --quick run: run `make bench`")
    draw(rows, options.picture)
    text = options.page.read_text()
    before, _, rest = text.partition(BEGIN)
    options.page.write_text(f"{before}{BEGIN}\n\n{table(rows)}\n\n{END}{rest.partition(END)[2]}")
    print(f"drawn: {options.picture}; written: {options.page}")


if __name__ == "__main__":
    main()
