"""Cost of an executor's journal of a session: seconds per decoded token with a journal, divided by those without.

    python -m evaluation.benchmarks.bench_log [--json] [--quick] [--case decode]

Two servers, one with `--journal-gib 0`, have a client each. The clients decode alternately; each waits for every token.
`decode` has the size of GPT-2-small, `toy` two layers of width 64. The value is the median over pairs of periods.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import djinn
from evaluation.benchmarks.bench_balance import REMOTE, clients
from evaluation.benchmarks.bench_models import decode
from evaluation.benchmarks.measuring import Case, Effort, Outcome, main
from evaluation.served import served

WARM_SECONDS, SECONDS, TURNS = 6.0, 1.0, 8  # of a turn; turns a round
TOY = {"n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 512, "n_positions": 256}


def connect(settings: dict[str, Any], config: dict[str, int]) -> Callable[[], object]:
    """Return a step of a client: one token."""
    djinn.configure(**settings)
    return decode(**config)(REMOTE)


def log(config: dict[str, int], effort: Effort) -> Outcome:
    """Return the time per token with a journal, divided by the time without."""
    with ExitStack() as stack:
        connects = []
        for options in ((), ("--journal-gib", "0")):
            running = stack.enter_context(served(*options, threads=1))
            settings = {"servers": [running.tcp], "token": running.token, "disable": ("local",)}
            connects.append(partial(connect, settings, config))
        each = [stack.enter_context(clients([item])) for item in connects]
        for item in each:
            item.steps(0.1 if effort.small else WARM_SECONDS)
        rates = []
        for turn in range(1 if effort.small else TURNS * effort.rounds):
            results = {
                number: each[number].steps(0.1 if effort.small else SECONDS) for number in ((0, 1), (1, 0))[turn % 2]
            }
            rates.append((results[0], results[1]))
    with_log, without = (statistics.median(column) for column in zip(*rates, strict=True))
    figures = {"tokens/s with": with_log, "tokens/s without": without}
    return Outcome(statistics.median([without / with_log for with_log, without in rates]), figures)


CASES = tuple(Case(name, 1.02, partial(log, config)) for name, config in (("decode", {}), ("toy", TOY)))

if __name__ == "__main__":
    main("The log of a session", CASES)
