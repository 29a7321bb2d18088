"""Rates that `djinn plan --server` predicts, against measured rates on the server.

    python -m evaluation.benchmarks.fit_speed [--json FILE] [--only llama] [--all] [--calibration FOLDER]

Eight models of bench_fit.py (`--all`: all), on a local server with one thread, after `djinn calibrate --processor-time
--quick` in a separate cache directory (`--calibration` keeps it; `--assumed`: without calibration). The measured value
is the executor's processor time per token or step, the best of several after a warm-up: on one thread this is the
device time, independent of other load. `wall` is the rate that the program saw, with client and network. A ratio above
1 means that too much was predicted.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import attrs
import torch

from djinn_client.runtime import client
from djinn_core.system.processes import ThreadTimes
from evaluation.benchmarks.bench_fit import CASES, DEVICE, Case, Prediction, inputs_of, predicted
from evaluation.benchmarks.serving import connected_by_file

TURNS = 5
USUAL = ("llama, batch 1", "llama, batch 8", "gpt2", "bert", "vit", "resnet", "llama, AdamW", "resnet, SGD")
TOKENS = 16  # difference in length of two generations


@attrs.frozen
class Rates(Prediction):
    """Tokens, inputs or steps per second: predicted, measured on the device, and seen by the program."""

    wall: float


def best(run: Callable[[], object]) -> tuple[float, float]:
    """Return the least executor processor seconds and wall seconds of several runs."""
    run()
    run()
    times, found = ThreadTimes(client.executor_process()), []
    for _ in range(TURNS):
        processor, begun = times.read(), time.perf_counter()
        run()
        found.append((times.read() - processor, time.perf_counter() - begun))
    return min(one for one, _ in found), min(one for _, one in found)


def measured(model: torch.nn.Module, one: Case) -> tuple[float, float]:
    """Return tokens, inputs or steps per second: on the device, and in total."""
    model.to(DEVICE).train(one.step == "train")
    inputs = inputs_of(model, one)
    if one.step == "decode":

        def generate(new: int) -> Callable[[], object]:
            options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0}
            return lambda: model.generate(**inputs, **options).cpu()

        short, long = best(generate(one.new)), best(generate(one.new + TOKENS))
        device, wall = (one.batch * TOKENS / max(b - a, 1e-9) for a, b in zip(short, long, strict=True))
        return device, wall
    if one.step == "forward":

        def forward() -> None:
            with torch.no_grad():
                model(**inputs).logits.cpu()

        device, wall = (one.batch / seconds for seconds in best(forward))
        return device, wall
    kinds = {name.lower(): kind for name, kind in vars(torch.optim).items() if isinstance(kind, type)}
    optimizer = kinds[one.optimizer](model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        output = model(**inputs)
        loss = output.loss if output.loss is not None else output.logits.float().mean()
        loss.backward()
        optimizer.step()
        loss.item()

    device, wall = (1 / seconds for seconds in best(step))
    return device, wall


def calibrate(folder: Path) -> None:
    """Calibrate this machine, if that was not done."""
    if not any(folder.rglob("calibration/*")):
        command = [sys.executable, "-m", "djinn_core.cli", "calibrate", "--processor-time", "--quick"]
        subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there, too")
    parser.add_argument("--only", default="", help="the models whose names contain this")
    parser.add_argument("--all", action="store_true", help="all models")
    parser.add_argument("--calibration", type=Path, metavar="FOLDER", help="the cache directory that is used")
    parser.add_argument("--assumed", action="store_true", help="without a calibration")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found: dict[str, Rates] = {}
    with tempfile.TemporaryDirectory() as folder:
        cache = options.calibration or Path(folder)
        os.environ |= {"TRANSFORMERS_VERBOSITY": "error", "DJINN_CONFIG": os.devnull, "DJINN_CALIBRATE": "0"}
        os.environ["XDG_CACHE_HOME"] = str(cache)
        if not options.assumed:
            calibrate(cache)
        print("| model | step | predicted/s | measured/s | ratio | wall/s |\n| --- | --- | --- | --- | --- | --- |")
        for name, one in CASES.items():
            if options.only not in name or not (options.all or options.only or name in USUAL):
                continue
            torch.manual_seed(0)
            with connected_by_file("--store-gib", "0") as file:
                model, config = one.built()
                told = predicted(config, one, file)
                rates = found[name] = Rates(told["rate"], *measured(model, one))
            said = " ".join(one.options).replace("--", "").replace("step ", "")
            numbers = f"{rates.predicted:,.3g} | {rates.measured:,.3g} | {rates.ratio:.2f} | {rates.wall:,.3g}"
            print(f"| {name} | {said} | {numbers} |", flush=True)
    logs = [math.log(one.ratio) for one in found.values()]
    middle = math.exp(statistics.median(logs))
    within = sum(abs(one) <= math.log(2) for one in logs)
    print(f"\nmedian {middle:.2f}; {within} of {len(logs)} within a factor of two")
    if options.json:
        options.json.write_text(json.dumps({name: attrs.asdict(one) for name, one in found.items()}, indent=2) + "\n")


if __name__ == "__main__":
    main()
