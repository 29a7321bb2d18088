"""All tests that need a GPU, and a report to send back: `make test-gpu`, or `python tests/gpu/run_gpu.py --quick` in
three minutes.

Each part runs in a process with a time limit, so a part that fails, hangs or dies does not affect others. After each
part, `report.md` is rewritten with a summary first, and a line is appended to `report.jsonl`. The report has no names
of the machine, its user or folders. Without a GPU no part runs, and the report lists all parts. `--device fakegpu` and
`--device cpu` run the parts that need no GPU, to test the parts themselves.
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
from functools import partial
from pathlib import Path

import attrs

from evaluation import ROOT

PYTEST = (sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider")
TELLING_NOTHING = {"localhost", "root", "user", "ubuntu"}
BROKEN = {"FAILED", "CRASHED", "TIMED OUT"}
TAIL = 3000  # characters of a log in the report
PACKAGES = ("djinn", "torch", "triton", "torch-tensorrt", "transformers", "diffusers", "numpy")
ASKED = "name,driver_version,compute_cap,memory.total,memory.used,pcie.link.gen.current,pcie.link.width.current,mig.mode.current"
PRIVATE = re.compile(
    r"\b\d{1,3}(?:\.\d{1,3}){3}\b|\b[0-9a-f]{2}(?::[0-9a-f]{2}){5,}|GPU-[0-9a-f-]{8,}"
    r"|\b(?=[\w-]*\d)(?=[\w-]*[A-Z])[\w-]{40,}"  # tokens have digits and capitals; test names do not have both
)


@attrs.frozen
class Part:
    """One part of the report.

    Attributes:
        command: command with `{device}` and `{to}` for the device and the result file.
        covers: claim of the documents that only this part tests.
        seconds: time limit. quick: time limit of the short form, or 0 if the short form leaves the part out.
        gpu: True if the part needs a GPU.
        client: True if the part needs the client's device, which the part `native_library` builds.
    """

    name: str
    covers: str
    command: Sequence[str]
    seconds: int = 300
    gpu: bool = False
    quick: int = 0
    client: bool = False


def own(
    name: str, covers: str, seconds: int = 300, *, gpu: bool = False, quick: int = 0, module: str = "parts"
) -> Part:
    """Return a part that `module` of this package runs. Other arguments are fields of `Part`."""
    command = (sys.executable, "-m", f"evaluation.gpu.{module}", name, "--device", "{device}", "--to", "{to}")
    return Part(name, covers, command, seconds, gpu, quick, module == "parts")


executor_part = partial(own, module="executor_parts", quick=45)


def of_plugin(folder: str, covers: str) -> Part:
    """Return the tests of a plugin, including those that skip without a GPU."""
    return Part(f"tests of {Path(folder).name}", covers, (*PYTEST, folder), 900, gpu=True)


ALL = (
    executor_part("replay_library", "the library with which executors issue ops, built here"),
    executor_part("decode_steps", "decoding beside PyTorch: values, times, hidden synchronisations"),
    executor_part("train_steps", "training beside PyTorch: values, times, hidden synchronisations"),
    executor_part("device_assert", "a device-side assert: the op is named, the executor ends, the next one works"),
    executor_part("hung_kernel", "a hung kernel: found, and the next executor works"),
    executor_part("exhausted", "out of memory: retry, and the op alone fails"),
    executor_part("issuing", "time per op that the executor issues"),
    executor_part("transfers", "bandwidth, page-locked memory, uploads beside ops"),
    executor_part("slow_fetch", "a session that waits for a result, beside another one"),
    executor_part("device_time", "times of device events"),
    executor_part("graph_capture", "a graph of a decode step"),
    executor_part("native_library", "the client's device, built here", quick=150),
    own("devices", "the device's name and memory, as a client sees them"),
    of_plugin("plugins/cuda", "copies beside ops, memory figures of the device itself"),
    own("training", "training equals that on the device here", quick=40),
    own("generation", "generation equals that on the device here"),
    own("randomness", "random numbers are those of the device here"),
    own("autocast", "bfloat16 under autocast"),
    own("numeric_settings", "matmul precision and deterministic algorithms"),
    own("streams", "streams and events", quick=30),
    own("copies", "pinned memory: a large tensor up and down"),
    own("memory_figures", "memory figures"),
    own("out_of_memory", "an op that can never fit"),
    own("filling", "a device that is filled up", gpu=True),
    own("asserts", "device-side asserts, and what the session does afterwards", quick=40),
    own("spill", "values that are spilled under a memory limit"),
    own("idle", "idle sessions, whose values go to the host's memory"),
    own("weights", "weights that the server reads"),
    own("cuda_names", "scripts written for CUDA"),
    own("two_clients", "two programs on one device", quick=40),
    own("crash", "an executor that dies"),
    own("inductor", "compiled by inductor", 420),
    own("graphs", "recorded graphs of programs"),
    own("tensorrt", "TensorRT", 600, gpu=True),
    of_plugin("plugins/compilers", "the conformance suite of compilers with TensorRT"),
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
    """Return facts about the machine, and versions of its software. Unknown facts are left out."""
    results: dict[str, object] = {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "processors": os.cpu_count(),
    }
    for package in PACKAGES:
        try:
            results[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            results[package] = "not installed"
    code = "import torch, json; v = torch.version; c = torch.cuda; print(json.dumps([v.cuda, c.is_available(), c.device_count()]))"
    process = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    if process.returncode == 0:
        results["torch: CUDA, usable, GPUs"] = json.loads(process.stdout.splitlines()[-1])
    else:
        results["torch"] = f"{results['torch']}, which cannot be imported: {process.stderr[-500:]}"
    try:
        options = ["nvidia-smi", f"--query-gpu={ASKED}", "--format=csv,noheader"]
        smi = subprocess.run(options, check=False, capture_output=True, text=True, timeout=60)
        lines = [line.strip() for line in (smi.stdout or smi.stderr).splitlines()]
        results["nvidia-smi"] = f"does not run: {' '.join(lines)}" if smi.returncode else lines
    except (OSError, subprocess.TimeoutExpired) as error:
        results["nvidia-smi"] = f"does not run: {type(error).__name__}"
    return results


def why_not(found: Mapping[str, object]) -> str:
    """Return the reason why PyTorch can use no GPU here, or "" if it can. `found`: result of `facts`."""
    text = found.get("torch: CUDA, usable, GPUs")
    if not isinstance(text, list):
        return "torch cannot be imported"
    if text[1]:
        return ""
    if not isinstance(found.get("nvidia-smi"), list):
        return "there is no GPU: nvidia-smi does not run"
    if text[0] is None:
        return 'torch is a build without CUDA: see "PyTorch" in docs/install.md'
    return f"torch (for CUDA {text[0]}) finds no GPU, though nvidia-smi runs: is the driver older than that CUDA?"


def without_names(text: str) -> str:
    """Return a text without folders, machine and user names, addresses, tokens and serial numbers."""
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


def run_part(part: Part, device: str, folder: Path, seconds: float) -> dict[str, object]:
    """Run a part, and return its row: verdict, figures, and, unless it passed, the last log lines."""
    to, log = folder / f"{part.name}.json", folder / f"{part.name}.log"
    to.unlink(missing_ok=True)
    command = [word.replace("{device}", device).replace("{to}", str(to)) for word in part.command]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "DJINN_CONFIG": os.devnull, "TOKENIZERS_PARALLELISM": "false"}
    environment = {
        name: value for name, value in environment.items() if not name.startswith("DJINN_") or name == "DJINN_CONFIG"
    }
    start = time.monotonic()
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
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            end_group(process)
    text = log.read_text(errors="replace")
    row: dict[str, object] = {"seconds": round(time.monotonic() - start, 1)}
    row |= ended(status, to, text, seconds)
    if row["result"] in BROKEN:
        row["log"] = text[-TAIL:]
    return row


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End a part and its servers."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        time.sleep(0.5)
    process.wait()


def ended(status: int | None, to: Path, said: str, seconds: float) -> dict[str, object]:
    """Return the result of a part, from its exit status, result file or output."""
    if status is None:
        return {"result": "TIMED OUT", "why": f"the part took more than {seconds:.0f} s"}
    if status < 0:
        return {"result": "CRASHED", "why": f"signal {signal.Signals(-status).name}"}
    last = next((line for line in reversed(said.splitlines()) if line.strip()), "")
    try:
        content = json.loads(to.read_text()) if to.exists() else json.loads(last)
    except ValueError:
        content = last
    if isinstance(content, dict) and "result" in content:
        return content
    if isinstance(content, dict) and "summary" in content:  # the zoo's results are long
        content = content["summary"]
    return {"result": "FAILED" if status else "passed", "found": content}


def summary(rows: Sequence[Mapping[str, object]]) -> list[str]:
    """Return lines that list failed, slow, passed and skipped parts."""
    groups = {"broken": BROKEN, "slow": {"slow"}, "fine": {"passed"}, "not run": {"not run"}}
    lines = []
    for group, results in groups.items():
        matching = [row for row in rows if row["result"] in results]
        lines.append(
            f"{group}: {len(matching)}" + (f" ({', '.join(str(row['part']) for row in matching)})" if matching else "")
        )
        reasons = [cell(row.get("why", "see its log"))[:300] for row in matching] if group != "fine" else []
        for why in dict.fromkeys(reasons):
            names = [str(row["part"]) for row, other in zip(matching, reasons, strict=True) if other == why]
            lines.append(f"- {', '.join(names)}: {why}")
    return lines


def report(rows: Sequence[Mapping[str, object]], about: Mapping[str, object], device: str) -> str:
    """Return the report as Markdown."""
    lines = ["# Djinn on a GPU", "", f"Device: `{device}`.", "", *summary(rows)]
    lines += ["", "| | |", "| --- | --- |", *(f"| {name} | {cell(value)} |" for name, value in about.items())]
    lines += [
        "",
        "| part | feature | result | seconds | findings, or reason |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        text = "; ".join(cell(row[name]) for name in ("why", "found") if row.get(name))
        lines.append(f"| {row['part']} | {row['covers']} | {row['result']} | {row.get('seconds', '')} | {text} |")
    for row in rows:
        if row.get("log"):
            lines += ["", f"## {row['part']}", "", "```text", str(row["log"]).replace("```", "'''"), "```"]
    return without_names("\n".join(lines) + "\n")


def cell(value: object) -> str:
    """Return a short value on one line for a table."""
    if isinstance(value, dict):
        value = "; ".join(f"{name}: {cell(inner)}" for name, inner in value.items())
    return " ".join(str(value).replace("|", "/").split())[:700]


def not_tried(part: Part, device: str, lacking: str, rows: Sequence[Mapping[str, object]]) -> str:
    """Return the reason why a part is not run, or "" if it is run.

    `lacking`: reason why there is no GPU, or "". `rows`: results of earlier parts.
    """
    if part.gpu and not device.startswith("cuda"):
        return lacking or "it needs a GPU"
    for row in rows:
        if part.client and row["part"] == "native_library" and row["result"] != "passed":
            return "it needs the client's device: see native_library"
    return lacking


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--device",
        default="cuda:0",
        help="device of the parts; with fakegpu or cpu, parts that need no GPU run, to test the parts",
    )
    parser.add_argument("--only", nargs="*", choices=[part.name for part in ALL], help="these parts alone")
    parser.add_argument("--quick", action="store_true", help="run the short form, which ends within --seconds")
    parser.add_argument("--seconds", type=float, default=170.0, help="time of the short form")
    folder = Path(os.environ.get("OUT") or ROOT / "build" / "gpu-report")
    parser.add_argument(
        "--to", "--out", type=Path, default=folder, help="folder of the report; default: $OUT or build/gpu-report"
    )
    options = parser.parse_args(arguments)
    end = time.monotonic() + options.seconds
    folder = options.to.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    about, rows = facts(), list[dict[str, object]]()
    lacking = why_not(about) if options.device.startswith("cuda") else ""
    lines = folder / "report.jsonl"
    lines.write_text(without_names(json.dumps({"device": options.device, "about": about})) + "\n")
    for part in ALL:
        if part.name not in (options.only or [part.name]) or (options.quick and not part.quick):
            continue
        row: dict[str, object] = {"part": part.name, "covers": part.covers}
        seconds = min(part.quick, end - time.monotonic()) if options.quick else part.seconds
        if reason := not_tried(part, options.device, lacking, rows) or ("no time was left" if seconds < 5 else ""):
            row |= {"result": "not run", "why": reason}
        else:
            print(f"{part.name} ...", end=" ", flush=True)
            with tempfile.TemporaryDirectory() as logs:
                row |= run_part(part, options.device, Path(logs), seconds)
            if row["result"] == "TIMED OUT" and seconds < part.quick:
                row |= {"result": "not run", "why": f"{seconds:.0f} s were left, which is too short for this part"}
            result = cell(row.get("why", "")), cell(row.get("found", ""))
            print(row["result"], f"({row['seconds']} s)", *result, flush=True)
        rows.append(row)
        (folder / "report.md").write_text(report(rows, about, options.device))
        with lines.open("a") as file:
            file.write(without_names(json.dumps(row, default=str)) + "\n")
    print(without_names("\n".join(["", *summary(rows)])))
    print(f"Please send report.md and report.jsonl of {os.path.relpath(folder)}")
    return any(row["result"] in BROKEN for row in rows)


if __name__ == "__main__":
    sys.exit(main())
