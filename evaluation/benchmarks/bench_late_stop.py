"""`generate()` over a slow link, with blocking and with late stop checks (`plugins/integrations`).

    python -m evaluation.benchmarks.bench_late_stop [--json] [--quick] [--case late_30_ms]

The time of a token is the difference between a long and a short generation, without prefill and set-up. The reference
of `late_*` is a token over loopback with a blocking check, before and after. The reference of `waited_*` adds the
link's round trip, measured by a raw socket.
"""

from __future__ import annotations

import statistics
from functools import partial
from time import perf_counter

import torch

import djinn
from evaluation.benchmarks.bench_models import REMOTE, TOY, gpt2
from evaluation.benchmarks.links import Conditions, connected_over
from evaluation.benchmarks.measuring import Case, Effort, Outcome, main
from evaluation.benchmarks.serving import connected

SHORT, LONG = 8, 40  # numbers of tokens
WARM_CALLS = 3
CALLS = 4
Config = dict[str, int]


def token(config: Config, effort: Effort, late: bool) -> tuple[float, float]:
    """Return seconds and awaited replies per token of greedy generation."""
    djinn.configure(disable=() if late else ("late_stop",))
    model = gpt2(**config).eval().to(REMOTE)
    inputs = torch.arange(16, device=REMOTE)[None]
    seconds_spent: dict[int, list[float]] = {SHORT: [], LONG: []}
    waits: dict[int, int] = {}
    for call in range(WARM_CALLS + effort.times(CALLS) * effort.rounds):
        for count, seconds in seconds_spent.items():
            waits[count] = djinn.stats()["round_trips"]
            begun = perf_counter()
            # A stop string that never occurs, so that the check is made.
            model.generate(
                inputs,
                attention_mask=torch.ones_like(inputs),
                do_sample=False,
                min_new_tokens=count,
                max_new_tokens=count,
                eos_token_id=0,
                pad_token_id=0,
            )
            if call >= WARM_CALLS:
                seconds.append(perf_counter() - begun)
            waits[count] = djinn.stats()["round_trips"] - waits[count]
    djinn.configure(disable=())
    more = LONG - SHORT
    return (
        (statistics.median(seconds_spent[LONG]) - statistics.median(seconds_spent[SHORT])) / more,
        (waits[LONG] - waits[SHORT]) / more,
    )


def over_link(conditions: Conditions, config: Config, late: bool, effort: Effort) -> Outcome:
    """Return a token's time over the link, divided by blocking time on loopback plus, unless `late`, a round trip."""
    config = TOY if effort.small else config
    loopback = []

    def over_loopback() -> None:
        with connected(threads=effort.threads):
            loopback.append(token(config, effort, late=False)[0])

    over_loopback()
    with connected_over(conditions, threads=effort.threads) as link:
        seconds, waits = token(config, effort, late)
    over_loopback()
    there_and_back = 0.0 if late else link.measured
    reference = statistics.mean(loopback) + there_and_back
    figures = {"loopback ms": statistics.mean(loopback) * 1e3, "link ms": link.measured * 1e3, "ours ms": seconds * 1e3}
    return Outcome(seconds / reference, figures | {"waits": waits})


def on_loopback(config: Config, effort: Effort) -> Outcome:
    """Return the time of a token over loopback with a late check, divided by the time with a blocking check."""
    config = TOY if effort.small else config
    with connected(threads=effort.threads):
        before = token(config, effort, late=False)[0]
        seconds, waits = token(config, effort, late=True)
        reference = statistics.mean([before, token(config, effort, late=False)[0]])
    return Outcome(seconds / reference, {"reference ms": reference * 1e3, "ours ms": seconds * 1e3, "waits": waits})


SLOW = Conditions(0.03)
CASES = (
    Case("waited_30_ms", 1.05, partial(over_link, SLOW, {}, False)),
    Case("late_30_ms", 1.15, partial(over_link, SLOW, {}, True)),
    Case("late_10_ms", None, partial(over_link, Conditions(0.01), {}, True)),
    Case("late_loopback", None, partial(on_loopback, {})),
    Case("toy_late_30_ms", None, partial(over_link, SLOW, TOY, True)),
    Case("toy_late_loopback", None, partial(on_loopback, TOY)),
)

if __name__ == "__main__":
    main("Stop checks of generate()", CASES)
