"""Everything that needs a GPU, and a report to send back: `make test-gpu`.

Each part is a process of its own with a time limit, so that one which fails, hangs or dies leaves the others. The report is written anew after
each, as Markdown and as JSON, without names of the machine, of its user or of folders. Without a GPU it lists what was not run, and runs
nothing; `--device cpu` runs what needs none, so that the parts themselves can be tried.
"""

from __future__ import annotations

import argparse
import getpass
import importlib.metadata
import json
import os
import platform
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs

from evaluation import ROOT

PYTEST = (sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider")
TELLING_NOTHING = {"localhost", "root", "user", "ubuntu"}
TAIL = 3000  # characters of a log that the report has
PACKAGES = ("djinn", "torch", "triton", "torch-tensorrt", "transformers", "diffusers", "numpy")
ASKED = "name,driver_version,compute_cap,memory.total,memory.used,pcie.link.gen.current,pcie.link.width.current,mig.mode.current"
PRIVATE = re.compile(
    r"\b\d{1,3}(?:\.\d{1,3}){3}\b|\b[0-9a-f]{2}(?::[0-9a-f]{2}){5,}|GPU-[0-9a-f-]{8,}"
    r"|\b(?=[\w-]*\d)(?=[\w-]*[A-Z])[\w-]{40,}"  # tokens have digits and capitals, names of tests have not both
)


@attrs.frozen
class Part:
    """One thing to try.

    Attributes:
        command: what is run; `{device}` and `{to}` stand for the device and for a file for what was found.
        covers: what of the documents is said to be untried.
        seconds: the time limit.
        gpu: whether it says nothing without one.
    """

    name: str
    covers: str
    command: Sequence[str]
    seconds: int = 300
    gpu: bool = False


def own(name: str, covers: str, seconds: int = 300, *, gpu: bool = False) -> Part:
    """A part of `parts.py`."""
    return Part(
        name,
        covers,
        (sys.executable, "-m", "evaluation.gpu.parts", name, "--device", "{device}", "--to", "{to}"),
        seconds,
        gpu,
    )


def of_plugin(folder: str, covers: str) -> Part:
    """The tests of a plugin, those that skip without a GPU among them."""
    return Part(f"tests of {Path(folder).name}", covers, (*PYTEST, folder), 900, gpu=True)


ALL = (
    own("devices", "the device's name and memory, as a client sees them"),
    of_plugin("plugins/cuda", "copies beside ops, memory figures of the device itself"),
    own("training", "training equals that on the device here"),
    own("generation", "generation equals that on the device here"),
    own("randomness", "random numbers are those of the device here"),
    own("autocast", "bfloat16 under autocast"),
    own("numeric_settings", "matmul precision and deterministic algorithms"),
    own("streams", "streams and events"),
    own("copies", "pinned memory: a large tensor up and down"),
    own("memory_figures", "memory figures"),
    own("out_of_memory", "an op that can never fit"),
    own("filling", "a device that is filled up", gpu=True),
    own("asserts", "device-side asserts"),
    own("spill", "values that are spilled under a memory limit"),
    own("idle", "idle sessions, whose values go to the host's memory"),
    own("weights", "weights that the server reads"),
    own("cuda_names", "scripts written for CUDA"),
    own("two_clients", "two programs on one device"),
    own("crash", "an executor that dies"),
    own("inductor", "compiled by inductor", 420),
    own("cudagraphs", "CUDA graphs", 420, gpu=True),
    own("tensorrt", "TensorRT", 600, gpu=True),
    of_plugin("plugins/compilers", "the conformance suite of compilers with CUDA graphs and with TensorRT"),
    own("calibration", "measured speeds", 600),
    own("ray", "an executor that a Ray cluster starts", 420),
    own("two_gpus", "two GPUs as one device", gpu=True),
    Part(
        "zoo",
        "models of many architectures, equal to the same on the device here",
        (
            sys.executable,
            "-W",
            "ignore",
            "-m",
            "evaluation.zoo.run_zoo",
            "--short",
            "--device",
            "{device}",
            "--json",
            "{to}",
        ),
        1800,
    ),
    own("databases", "PyTorch's database of ops, the first samples of each", 3600, gpu=True),
    own("demo", "djinn demo", 900),
    own("times", "the benchmark table, in milliseconds", 900),
)


def facts() -> dict[str, object]:
    """Machine and versions, as far as they can be found out."""
    found: dict[str, object] = {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "processors": os.cpu_count(),
    }
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    code = "import torch, json; v = torch.version; c = torch.cuda; print(json.dumps([v.cuda, c.is_available(), c.device_count()]))"
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    if done.returncode == 0:
        found["torch: CUDA, usable, GPUs"] = json.loads(done.stdout.splitlines()[-1])
    else:
        found["torch"] = f"{found['torch']}, which cannot be imported: {done.stderr[-500:]}"
    try:
        asked = ["nvidia-smi", f"--query-gpu={ASKED}", "--format=csv,noheader"]
        smi = subprocess.run(asked, check=False, capture_output=True, text=True, timeout=60)
        lines = [line.strip() for line in (smi.stdout or smi.stderr).splitlines()]
        found["nvidia-smi"] = f"does not run: {' '.join(lines)}" if smi.returncode else lines
    except (OSError, subprocess.TimeoutExpired) as error:
        found["nvidia-smi"] = f"does not run: {type(error).__name__}"
    return found


def why_not(found: Mapping[str, object]) -> str:
    """The reason why torch can use no GPU here; empty: it can."""
    said = found.get("torch: CUDA, usable, GPUs")
    if not isinstance(said, list):
        return "torch cannot be imported"
    if said[1]:
        return ""
    if not isinstance(found.get("nvidia-smi"), list):
        return "there is no GPU: nvidia-smi does not run"
    if said[0] is None:
        return 'torch is a build without CUDA: see "Another build of PyTorch" in README.md'
    return f"torch (for CUDA {said[0]}) finds no GPU, though nvidia-smi runs: is the driver older than that CUDA?"


def without_names(text: str) -> str:
    """A text without folders, the machine's and the user's name, addresses, tokens and serial numbers."""
    folders = {
        str(ROOT): "CHECKOUT",
        sys.prefix: "ENVIRONMENT",
        str(Path.home()): "HOME",
        tempfile.gettempdir(): "TEMP",
    }
    for folder, name in sorted(folders.items(), key=lambda item: -len(item[0])):
        text = text.replace(folder, name) if len(folder) > 1 else text
    for name, instead in ((socket.gethostname(), "MACHINE"), (getpass.getuser(), "USER")):
        if name not in TELLING_NOTHING:
            text = re.sub(rf"\b{re.escape(name)}\b", instead, text)
    return PRIVATE.sub(lambda found: "127.0.0.1" if found[0] == "127.0.0.1" else "PRIVATE", text)


def tried(part: Part, device: str, folder: Path) -> dict[str, object]:
    """The row of a part: how it ended, what it found, and the end of its log where it did not pass."""
    to, log = folder / f"{part.name}.json", folder / f"{part.name}.log"
    to.unlink(missing_ok=True)
    command = [word.replace("{device}", device).replace("{to}", str(to)) for word in part.command]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "DJINN_CONFIG": os.devnull, "TOKENIZERS_PARALLELISM": "false"}
    environment = {
        name: value for name, value in environment.items() if not name.startswith("DJINN_") or name == "DJINN_CONFIG"
    }
    began = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=ROOT,
            env=environment,
            start_new_session=True,
        )
        try:
            status = process.wait(part.seconds)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            end_group(process)
    said = log.read_text(errors="replace")
    row: dict[str, object] = {"seconds": round(time.monotonic() - began, 1)}
    row |= ended(status, to, said, part)
    if row["result"] != "passed" and row["result"] != "not run":
        row["log"] = said[-TAIL:]
    return row


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End a part, and the servers that it started and left."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        time.sleep(0.5)
    process.wait()


def ended(status: int | None, to: Path, said: str, part: Part) -> dict[str, object]:
    """Result of a part, from its exit status, its file, or what it printed."""
    if status is None:
        return {"result": "TIMED OUT", "why": f"it took more than {part.seconds} s"}
    if status < 0:
        return {"result": "CRASHED", "why": f"signal {signal.Signals(-status).name}"}
    last = next((line for line in reversed(said.splitlines()) if line.strip()), "")
    try:
        found = json.loads(to.read_text()) if to.exists() else json.loads(last)
    except ValueError:
        found = last
    if isinstance(found, dict) and "result" in found:
        return found
    if isinstance(found, dict) and "summary" in found:  # of the zoo, whose results are long
        found = found["summary"]
    return {"result": "FAILED" if status else "passed", "found": found}


def report(rows: Sequence[Mapping[str, object]], about: Mapping[str, object], device: str) -> str:
    """The report as Markdown."""
    counts = {
        result: sum(row["result"] == result for row in rows) for result in dict.fromkeys(str(r["result"]) for r in rows)
    }
    lines = [
        "# Djinn on a GPU",
        "",
        f"Device: `{device}`. " + ", ".join(f"{n} {result}" for result, n in counts.items()) + ".",
    ]
    lines += ["", "| | |", "| --- | --- |", *(f"| {name} | {cell(value)} |" for name, value in about.items())]
    lines += [
        "",
        "| part | what it is about | result | seconds | found, or why not |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        said = row.get("why") or row.get("found", "")
        lines.append(f"| {row['part']} | {row['covers']} | {row['result']} | {row.get('seconds', '')} | {cell(said)} |")
    for row in rows:
        if row.get("log"):
            lines += ["", f"## {row['part']}", "", "```text", str(row["log"]).replace("```", "'''"), "```"]
    return without_names("\n".join(lines) + "\n")


def cell(value: object) -> str:
    """A value in a table: on one line, and not too long."""
    if isinstance(value, dict):
        value = "; ".join(f"{name}: {cell(inner)}" for name, inner in value.items())
    return " ".join(str(value).replace("|", "/").split())[:700]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda:0", help="cpu: what needs no GPU, to try the parts themselves")
    parser.add_argument("--only", nargs="*", choices=[part.name for part in ALL], help="these parts alone")
    parser.add_argument("--to", type=Path, default=ROOT / "build" / "gpu-report", help="folder of the report")
    options = parser.parse_args()
    folder = options.to.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    about, rows = facts(), []
    lacking = why_not(about) if options.device.startswith("cuda") else ""
    chosen = [part for part in ALL if not options.only or part.name in options.only]
    for part in chosen:
        row: dict[str, object] = {"part": part.name, "covers": part.covers}
        if lacking:
            row |= {"result": "not run", "why": lacking}
        elif part.gpu and not options.device.startswith("cuda"):
            row |= {"result": "not run", "why": "it needs a GPU"}
        else:
            print(f"{part.name} ...", end=" ", flush=True)
            row |= tried(part, options.device, folder)
            print(row["result"], f"({row['seconds']} s)", cell(row.get("why", "")), flush=True)
        rows.append(row)
        (folder / "report.md").write_text(report(rows, about, options.device))
        whole = json.dumps({"device": options.device, "about": about, "parts": rows}, indent=1, default=str)
        (folder / "report.json").write_text(without_names(whole) + "\n")
    left = [row for row in rows if row["result"] == "not run"]
    for row in left:
        print(f"not run: {row['part']} ({row['covers']}): {row['why']}")
    print(
        f"{len(rows) - len(left)} of {len(rows)} parts ran. Please send report.md and report.json of {os.path.relpath(folder)}"
    )
    return any(row["result"] not in {"passed", "not run"} for row in rows)


if __name__ == "__main__":
    sys.exit(main())
