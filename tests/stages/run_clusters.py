"""Random programs for random clusters, with every placement policy: no plan may exceed what a device has, or miss a dtype.

    python tests/stages/run_clusters.py [--clusters 1000] [--seed 0] [--json]

The plans are checked by a simple check of the tests' own (`clusters.py`). With --json one object on the last line. Ends with status 1
where a plan breaks something. On one core 1,000 clusters take minutes.
"""

from __future__ import annotations

import argparse
import json
import sys

import attrs
from clusters import search


def main() -> int:
    """Search, and say what was found."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--clusters", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    tally = search(asked.seed, asked.clusters)
    for fault in tally.faults:
        print(fault)
    print(
        f"{asked.clusters:,} clusters: {tally.plans:,} plans, {tally.spread:,} over several devices, "
        f"{tally.fallen_back:,} by another policy than was asked for; {tally.refused:,} refused; {len(tally.faults):,} faults"
    )
    if asked.json:
        print(json.dumps(attrs.asdict(tally)))
    return 1 if tally.faults else 0


if __name__ == "__main__":
    sys.exit(main())
