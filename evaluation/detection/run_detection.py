"""torchvision on the remote device: its detection models, or its op tests.

Needs torchvision: `python -m evaluation torchvision`.

    python -m evaluation torchvision [--only faster_rcnn,ssd] [--json FILE]
    python -m evaluation torchvision --tests SOURCE [ARGUMENTS OF PYTEST ...]

Each model is evaluated and trained for one step, locally and on a server process. Detections, losses, gradients and
parameters are compared. With `--tests`, the CUDA tests of `test/test_ops.py` in torchvision's unpacked SOURCE run on
the remote device. Exits with 1 if a model differs or a test fails.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import warnings
from pathlib import Path

import pytest
from rich.console import Console

import djinn
from evaluation.detection.detectors import DETECTORS
from evaluation.zoo.likeness import REMOTE, compare
from evaluation.zoo.run_zoo import report, show
from evaluation.zoo.serving import serving

# Replacements of words about CUDA in the tests.
WORDS = {
    '"cuda"': f'"{REMOTE}"',
    "torch.cuda.amp.autocast()": 'torch.autocast("remote_accelerator")',
    "@needs_cuda": "",
    ", marks=pytest.mark.needs_cuda": "",
}
CHOSEN = "(remote or autocast or cuda_grads) and not autocast_cpu and not nms_float16"  # CPUs lack this kernel


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="names of models, separated by commas")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    parser.add_argument("--tests", nargs=argparse.REMAINDER, help="SOURCE, and arguments of pytest")
    options = parser.parse_args()
    with warnings.catch_warnings(), serving("--operators", "torchvision"):
        warnings.simplefilter("ignore")
        if options.tests:
            return run_tests(Path(options.tests[0]), options.tests[1:])
        names = options.only.split(",") if options.only else DETECTORS
        verdicts = [compare(DETECTORS[name]) for name in names]
    show(verdicts, Console(width=160))
    if options.json:
        options.json.write_text(json.dumps(report(verdicts), indent=1) + "\n")
    return int(not all(verdict.equal for verdict in verdicts))


def run_tests(source: Path, arguments: list[str]) -> int:
    """Run torchvision's CUDA op tests on the remote device. Return the exit status of pytest."""
    with tempfile.TemporaryDirectory() as name:
        shutil.copytree(source / "test", folder := Path(name, "test"), ignore=shutil.ignore_patterns("assets"))
        for file in (folder / "test_ops.py", folder / "common_utils.py"):
            text = file.read_text()
            for word, instead in WORDS.items():
                text = text.replace(word, instead)
            file.write_text(text)
        sys.path.insert(0, str(folder))
        options = ["-q", "-ra", "-c", "/dev/null", "--rootdir", name, "-p", "no:cacheprovider", "-k", CHOSEN]
        status = pytest.main([*options, str(folder / "test_ops.py"), *arguments])
    print({name: djinn.stats()[name] for name in ("ops_captured", "round_trips")})
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
