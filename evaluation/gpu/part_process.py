"""The process of one part of the GPU report."""

from __future__ import annotations

import argparse
import json
import traceback
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

Found = dict[str, object]


class NotRun(Exception):
    """The part cannot run here. The message says why."""


def needs_gpu(device: str, what: str) -> None:
    """Raise `NotRun` on a device that is not a GPU."""
    if not device.startswith("cuda"):
        raise NotRun(f"{what} need a GPU")


def run_part(parts: Mapping[str, Callable[[str], Found]], about: str | None) -> int:
    """Run the part that the command line names, and write its result to a file. Return the exit status."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("part", choices=parts)
    parser.add_argument("--device", required=True)
    parser.add_argument("--to", type=Path, required=True, help="file for what was found")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    try:
        result = parts[options.part](options.device)
        slow = result.pop("slow", "")
        row: Found = {"result": "slow", "why": slow} if slow else {"result": "passed"}
        row["found"] = result
    except NotRun as reason:
        row = {"result": "not run", "why": str(reason)}
    except BaseException as error:
        traceback.print_exc()
        row = {"result": "FAILED", "why": f"{type(error).__name__}: {error}"[:2000]}
    options.to.write_text(json.dumps(row, default=str))
    return 0
