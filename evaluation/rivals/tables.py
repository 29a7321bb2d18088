"""Tables and the picture of `python -m evaluation rivals`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from evaluation import ROOT
from evaluation.rivals.counting import PROGRAMS
from evaluation.rivals.published import PUBLISHED

PAGE, README = ROOT / "evaluation" / "results" / "rivals.md", ROOT / "README.md"
PICTURE = ROOT / "docs" / "images" / "rivals.svg"
BEGIN, END = "<!-- {}: written by `python -m evaluation rivals --page` -->", "<!-- end -->"
BUSY = (
    "Other programs kept the machine busy, so seconds are left out: they have not been measured on an idle machine yet."
)
Figures = Mapping[str, Any]
SHOWN = {  # phases in the short table
    "nanogpt": "20 iterations",
    "resnet18": "step, batch on the device",
    "gpt2": "second call",
    "llama7b": "second call",
    "diffusion": "second call",
}


def progress(name: str, round_trip_ms: float | None, phases: Mapping[str, Figures]) -> str:
    """Return a line about a program that has run."""
    where = "here" if round_trip_ms is None else f"{round_trip_ms:g} ms"
    seconds = ", ".join(f"{phase} {result['wall_seconds']:.2f} s" for phase, result in phases.items())
    return f"{name:10} {where:>8}  {seconds}"


def table(found: Figures) -> str:
    """Return counts and seconds of all programs, phases and links, as Markdown."""
    heads = (
        "program",
        "link",
        "messages up, down",
        "waits",
        "submissions",
        "bytes up",
        "bytes down",
        "client s",
        "wall s",
    )
    ran = f"{found['date']}, {found['machine']}. {BUSY if found['busy'] else ''}".rstrip()
    return "\n".join([ran, "", _row(heads), _row(["---"] * len(heads)), *map(_row, _rows(found))])


def _rows(found: Figures) -> Iterator[list[str]]:
    for name, program in PROGRAMS.items():
        for phase in _phases(found, name):
            title = f"{program.title}: {phase}"
            for link in _with(found, name):
                one = link["programs"][name][phase]
                yield [title, f"{link['round_trip_ms']:g} ms", *_counts(one), *_seconds(found, one)]
            if local := found["local"].get(name):
                yield [title, "local PyTorch", *["-"] * 5, *_seconds(found, local[phase])]


def _phases(found: Figures, name: str) -> list[str]:
    return list(next((link["programs"][name] for link in _with(found, name)), ()))


def _with(found: Figures, name: str) -> list[Figures]:
    return [link for link in found["links"] if name in link["programs"]]


def _counts(one: Figures) -> list[str]:
    times = one["repetitions"]
    counts = [one[key] / times for key in ("round_trips", "submissions", "bytes_sent", "bytes_received")]
    messages = f"{one['messages_sent'] / times:,.4g}, {one['messages_received'] / times:,.4g}"
    return [messages, *(f"{count:,.0f}" if count >= 100 else f"{count:g}" for count in counts)]


def _seconds(found: Figures, one: Figures) -> list[str]:
    if found["busy"]:
        return ["-", "-"]
    return [f"{one[key] / one['repetitions']:.3g}" for key in ("client_seconds", "wall_seconds")]


def pays(found: Figures) -> str:
    """Return a Markdown table: for each link, the cost of a ResNet-18 step that reads a value."""
    phase = SHOWN["resnet18"]
    heads = ("link", "a step with a read pays", "below this device time a step, it pays more than 10 %")
    if found["busy"]:
        return BUSY
    rows = [_row(heads), _row(["---"] * len(heads))]
    for link in _with(found, "resnet18"):
        one = link["programs"]["resnet18"][phase]
        paid = (one["wall_seconds"] - one["executor_seconds"]) / one["repetitions"] * 1e3
        rows.append(_row([f"{link['round_trip_ms']:g} ms", f"{paid:.0f} ms", f"{10 * paid:.0f} ms"]))
    return "\n".join(rows)


def published() -> str:
    """Return the published figures of other systems as Markdown."""
    heads = ("system", "program", "hardware and link", "published", "source")
    rows = [
        (
            p.system,
            PROGRAMS[p.program].title.partition(",")[0] if p.program in PROGRAMS else p.program,
            p.hardware,
            p.figure,
            p.source,
        )
        for p in PUBLISHED
    ]
    return "\n".join([_row(heads), _row(["---"] * len(heads)), *map(_row, rows)])


def summary(found: Figures) -> str:
    """Return the short table of README.md: counts, and wall seconds locally and over each link."""
    trips = [] if found["busy"] else ["local", *(f"{link['round_trip_ms']:g} ms" for link in found["links"])]
    heads = ("program", "waits", "messages", "submissions", "bytes up", "bytes down", *trips, "others publish")
    rows = [_row(heads), _row(["---"] * len(heads))]
    for name, program in PROGRAMS.items():
        phase, others_publish = SHOWN[name], [f"{p.system}: {p.figure}" for p in PUBLISHED if p.program == name]
        runs = [link["programs"][name][phase] for link in _with(found, name)]
        messages, waits, *others = _counts(runs[-1])
        walls = [f"{_seconds(found, run)[1]} s" for run in runs]
        local = f"{_seconds(found, found['local'][name][phase])[1]} s" if name in found["local"] else "-"
        seconds = [] if found["busy"] else [local, *walls]
        rows.append(
            _row(
                [
                    f"{program.title}: {phase}",
                    waits,
                    messages.partition(",")[0],
                    *others,
                    *seconds,
                    "; ".join(others_publish),
                ]
            )
        )
    return "\n".join(rows)


def _row(cells: Any) -> str:
    return f"| {' | '.join(cells)} |"


def write(found: Figures) -> None:
    """Write tables and picture into the documents."""
    PICTURE.write_text(picture(found))
    for file, parts in (
        (PAGE, {"figures": table(found), "pays": pays(found), "published": published()}),
        (README, {"rivals": summary(found)}),
    ):
        text = file.read_text()
        for name, part in parts.items():
            begin = BEGIN.format(name)
            head, _, rest = text.partition(begin)
            _, end, tail = rest.partition(END)
            if not end:
                raise SystemExit(f"{file.name} has no place for {name}: add the lines `{begin}` and `{END}`")
            text = f"{head}{begin}\n\n{part}\n\n{END}{tail}"
        file.write_text(text)


# --- the picture -------------------------------------------------------------------------------------------------

WIDTH, LEFT, BAR = 560, 150, 18


def picture(found: Figures) -> str:
    """Return a bar chart as SVG: the number of messages that a client sends for 20 iterations of nanoGPT."""
    ours = _with(found, "nanogpt")[-1]["programs"]["nanogpt"][SHOWN["nanogpt"]]["messages_sent"]
    bars = [(p.system, p.messages, "#b8c4d0") for p in PUBLISHED if p.program == "nanogpt" and p.messages]
    bars.append(("Djinn", ours, "#1c4587"))
    longest = max(messages for _, messages, _ in bars)
    height = BAR * (len(bars) + 2)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="11">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        '<text x="8" y="16" font-weight="bold">Messages for 20 iterations of nanoGPT 10.8M</text>',
    ]
    for number, (label, messages, colour) in enumerate(bars):
        y = BAR * (number + 1) + 8
        width = max(1.5, (WIDTH - LEFT - 70) * messages / longest)
        lines += [
            f'<text x="{LEFT - 6}" y="{y + 11}" text-anchor="end">{label}</text>',
            f'<rect x="{LEFT}" y="{y + 1}" width="{width:.1f}" height="{BAR - 5}" fill="{colour}"/>',
            f'<text x="{LEFT + width + 5:.1f}" y="{y + 11}">{messages:,.0f}</text>',
        ]
    return "\n".join([*lines, "</svg>", ""])
