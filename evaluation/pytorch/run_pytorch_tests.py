"""PyTorch's own tests on the remote device and on the CPU, compared by test: `python -m evaluation pytorch DIR
test_nn`.

    python -m evaluation pytorch DIR [test_nn test_torch ...] [--only PATTERN] [--stride 10 --first 3] [--again]

DIR is an unpacked PyTorch source (https://deb.debian.org/debian/pool/main/p/pytorch/ has 2.6), which is not part of
this repository. Each file runs on the device of PyTorch's `instantiate_device_type_tests`, over a server. Tests that
hang, crash or lose their session count as failures; the rest continues in another process or session. Results are
stored by file in a folder, so files can run one at a time; `--table` prints the stored results.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
from rich.console import Console
from rich.table import Table
from servers import fresh_python, start_server

from evaluation import ROOT
from evaluation.pytorch.results import FileResults, Outcome, as_values, markdown, read_all, totals
from evaluation.pytorch.worker import REMOTE, Order

FAMILIES = Path(__file__).with_name("families.py")
DOCUMENTS = ROOT / "evaluation" / "results"
BEGIN, END = "<!-- results: made by `python -m evaluation {}` -->", "<!-- end of results -->"
Start = Callable[..., Any]


class FileError(Exception):
    """A test file cannot be imported, or its process ends without a result."""


def main() -> int:
    """Run the files and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="unpacked PyTorch source")
    parser.add_argument("files", nargs="*", help="such as test_nn")
    parser.add_argument(
        "--families",
        action="store_true",
        help="DIR is the source of transformers, and the files are families of models",
    )
    parser.add_argument("--only", default="", help="regular expression that must match in names of tests")
    parser.add_argument("--stride", type=int, default=1, help="run only every N-th test")
    parser.add_argument("--first", type=int, default=0, help="index of the first test, with --stride")
    parser.add_argument(
        "--again",
        action="store_true",
        help="reuse the stored results of the CPU, and run the tests on the device again",
    )
    parser.add_argument(
        "--failed", action="store_true", help="as --again, but run only tests that failed on the device"
    )
    parser.add_argument(
        "--test-seconds",
        type=float,
        default=120.0,
        help="maximum processor time of a test, on client and server together, in seconds",
    )
    parser.add_argument(
        "--patience",
        type=float,
        default=10.0,
        help="maximum wall time of a test, as a multiple of its processor time limit",
    )
    parser.add_argument(
        "--file-seconds", type=float, default=1200.0, help="maximum wall time of a file on each device, in seconds"
    )
    parser.add_argument("--results", type=Path, default=Path("build/pytorch-tests"), help="folder of stored results")
    parser.add_argument("--json", type=Path, help="write the comparison to this file")
    parser.add_argument(
        "--document",
        action="store_true",
        help="write it to evaluation/results/pytorch_tests.md or evaluation/results/transformers_tests.md",
    )
    options = parser.parse_args()
    console = Console(width=180)
    for name in options.files:
        file = FAMILIES if options.families else options.source / "test" / f"{name}.py"
        if options.families:
            os.environ |= {
                "TRANSFORMERS_SOURCE": str(options.source.absolute()),
                "DJINN_TEST_FAMILY": name,
                "HF_HUB_OFFLINE": "1",
            }
        results = FileResults.read(options.results, name) if options.again or options.failed else FileResults(name)
        try:
            run_file(file, results, options)
        except FileError as error:
            console.print(f"{name}: {error}", markup=False)
            continue
        results.write(options.results)
        for test, there in results.failures():
            console.print(f"{name} {test}: {there.outcome}: {last_line(there.text)}", markup=False)
    everything = read_all(options.results)
    show(everything, console)
    if options.json:
        options.json.write_text(json.dumps(as_values(everything), indent=1) + "\n")
    if options.document:
        write_document(everything, "transformers" if options.families else "pytorch")
    return 0


def run_file(file: Path, results: FileResults, options: argparse.Namespace, start: Start = fresh_python) -> None:
    """Run the tests of a file on the CPU, and the passing ones remotely. `results` receives both.

    `start` starts a process as `subprocess.Popen` does, given the arguments of `python`.

    Raises:
        FileError: its process ends without a result.
    """
    if not results.cpu:
        answer = run_worker(file, "cpu", None, options, start, dict(os.environ))
        results.tests, choice = answer["tests"], answer["chosen"]
        results.chosen = "all" if choice == results.tests else chosen_by(options, choice)
        results.cpu = {test: Outcome(**outcome) for test, outcome in answer["outcomes"].items()}
    tests = [test for test, _ in results.failures()] if options.failed else results.passed_on_cpu()
    with server_environment(start) as (environment, server):
        answer = run_worker(file, REMOTE, tests, options, start, environment, server)
    earlier_results = results.remote if options.failed else {}
    results.remote = earlier_results | {test: Outcome(**outcome) for test, outcome in answer["outcomes"].items()}


def chosen_by(options: argparse.Namespace, count: int) -> str:
    """Return a description of the tests that the options select out of `count` tests."""
    ways = [f"one in {options.stride}"] if options.stride > 1 else []
    return ", ".join([f"{count}", *ways, *([f"`{options.only}`"] if options.only else [])])


@contextlib.contextmanager
def server_environment(start: Start) -> Iterator[tuple[dict[str, str], int]]:
    """Run a server during the block. Yield the environment of its clients, and its process id."""
    with tempfile.TemporaryDirectory() as name:
        environment = os.environ | {"DJINN_CONFIG": os.devnull, "OMP_NUM_THREADS": "1"}
        options = ("--threads", "1", "--drain-seconds", "1", "--store-gib", "0")
        server = start_server(start, Path(name), *options, env=environment)
        try:
            yield environment | {"DJINN_CONNECTION_FILE": str(server.file)}, server.process.pid
        finally:
            server.stop()


def run_worker(
    file: Path,
    device: str,
    named: Sequence[str] | None,
    options: argparse.Namespace,
    start: Start,
    env: dict[str, str],
    server: int | None = None,
) -> dict[str, Any]:
    """Return the lines that `worker.py` writes about the tests of a file on a device.

    Raises:
        FileError: it ends without a result.
    """
    limits = (options.test_seconds, options.file_seconds)
    order = Order(
        str(file.absolute()),
        device,
        named,
        options.only,
        options.stride,
        *limits,
        not options.families,
        options.patience,
        server,
        options.first,
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "order").write_text(json.dumps(attrs.asdict(order)))
        command = ["-W", "ignore", "-m", "evaluation.pytorch.worker", folder / "order", folder / "results"]
        with (folder / "log").open("wb") as log:
            start(
                *command,
                stdout=log,
                stderr=log,
                cwd=folder,
                env=env | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            ).wait()
        if not (folder / "results").exists():
            raise FileError(f"on {device}: {last_line((folder / 'log').read_text(errors='replace'))}")
        return json.loads((folder / "results").read_text())


def last_line(text: str) -> str:
    """Return the line of a traceback with the exception."""
    lines = [line for line in text.strip().splitlines() if line and not line.startswith((" ", "\t"))]
    raised = [line for line in lines if re.match(r"[\w.]+(Error|Exception|Lost|Operation|Warning|Failure)\b", line)]
    return (raised or lines or [""])[-1][:300]


def show(files: Sequence[FileResults], console: Console) -> None:
    """Print the table."""
    if not files:
        return
    rows = [file.row() for file in files]
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*row.values())
    console.print(table)
    console.print(totals(files))


def write_document(files: Sequence[FileResults], project: str) -> None:
    """Write the results between the markers of the project's document."""
    document, begin = DOCUMENTS / f"{project}_tests.md", BEGIN.format(project)
    before, _, rest = document.read_text().partition(begin)
    _, _, after = rest.partition(END)
    document.write_text(f"{before}{begin}\n\n{markdown(files)}\n\n{END}{after}")


if __name__ == "__main__":
    sys.exit(main())
