"""Random clusters for programs of the zoo, random programs and small programs, with every placement policy.

    python -m evaluation clusters [--zoo 1000] [--clusters 200] [--small 300] [--models gpt2,llama] [--seed 0] [--json]

No plan may exceed a device's memory, or run an op on a device without the op or dtype; `clusters.py` checks this
independently. For small programs all placements are examined (`exhaustive.py`): if one fits, each policy must find one.
With --json the last line is an object. Exits with 1 on a violation. Takes about ten minutes on one core.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
import warnings

import attrs

from evaluation.clusters.clusters import search
from evaluation.clusters.exhaustive import compare
from evaluation.clusters.zoo_clusters import ZOO, record, search_zoo

MODELS = 60  # number of models, evenly sampled from the zoo


def main() -> int:
    """Plan all programs, and report the outcome. Return 1 on a violation."""
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--zoo", type=int, default=1000, help="number of clusters for programs of the zoo, each with two policies"
    )
    parser.add_argument(
        "--clusters", type=int, default=200, help="number of clusters for random programs, each with all policies"
    )
    parser.add_argument(
        "--small", type=int, default=300, help="number of small programs whose placements are all examined"
    )
    parser.add_argument("--models", help="names of models of the zoo, separated by commas")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    logging.getLogger("djinn.stages").setLevel(logging.ERROR)  # two of the policies break rules on purpose
    start = time.process_time()
    random_ones, small = search(options.seed, options.clusters), compare(options.seed, options.small)
    print(f"{options.clusters:,} clusters, random programs: {random_ones.describe()}", flush=True)
    print(f"{options.small:,} clusters, small programs: {small.describe()}", flush=True)
    names = options.models.split(",") if options.models else list(ZOO)[:: max(1, len(ZOO) // MODELS)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        programs = record(names if options.zoo else [])
    zoo = search_zoo(programs.graphs, options.seed, options.zoo)
    print(f"{options.zoo:,} clusters, {len(programs.graphs):,} programs of {len(names):,} models: {zoo.describe()}")
    for left_out in programs.left_out:
        print(f"not recorded without a server: {left_out}")
    faults = [*random_ones.faults, *small.faults, *zoo.faults]
    for fault in faults:
        print(fault)
    print(f"{len(faults):,} faults; {time.process_time() - start:,.0f} s of processor time")
    if options.json:
        print(json.dumps({"random": attrs.asdict(random_ones), "small": attrs.asdict(small), "zoo": attrs.asdict(zoo)}))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
