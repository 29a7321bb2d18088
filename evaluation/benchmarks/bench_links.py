"""Decoding and transfers over slow links: the cost of round trips and bandwidth.

    python -m evaluation.benchmarks.bench_links [--json] [--quick] [--case decode_30_ms]

The reference of `decode_*` is a token over loopback, before and after, plus one round trip, measured by a raw socket
over the same link. That of `upload_*` is the bytes divided by the link's bandwidth.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial

import torch

import djinn
from evaluation.benchmarks.bench_models import REMOTE, TOY, WARM_CALLS, decode
from evaluation.benchmarks.links import Conditions, connected_over
from evaluation.benchmarks.measuring import Case, Effort, Outcome, main, median_of
from evaluation.benchmarks.serving import connected

TOKENS = 24
GIGABIT = 1e9
UPLOAD_BYTES = 64 << 20
Config = dict[str, int]


def token(config: Config, effort: Effort) -> tuple[float, float]:
    """Return seconds and blocking round trips per token with the connected server."""
    step = decode(TOKENS, **config)(REMOTE)
    for _ in range(2 if effort.small else WARM_CALLS):
        step()
    times = effort.times(TOKENS)
    before = djinn.stats()["round_trips"]
    seconds = statistics.median(median_of(step, times) for _ in range(effort.rounds))
    return seconds, (djinn.stats()["round_trips"] - before) / (times * effort.rounds)


def decoding(conditions: Conditions, config: Config, effort: Effort) -> Outcome:
    """Return the time of a token over the link, divided by the sum of its time over loopback and a round trip."""
    config = TOY if effort.small else config
    loopback = []

    def over_loopback() -> None:
        with connected(threads=effort.threads):
            loopback.append(token(config, effort)[0])

    over_loopback()
    with connected_over(conditions, threads=effort.threads) as link:
        seconds, trips = token(config, effort)
    over_loopback()
    reference = statistics.mean(loopback) + (link.measured if conditions.round_trip else 0.0)
    figures = {"loopback ms": statistics.mean(loopback) * 1e3, "link ms": link.measured * 1e3, "ours ms": seconds * 1e3}
    return Outcome(seconds / reference, figures | {"round trips": trips})


def upload(conditions: Conditions, effort: Effort) -> Outcome:
    """Return the time of 64 MiB both ways, divided by the least possible time: bytes over bandwidth, and a round trip.

    On a fast link, also measure one connection.
    """
    x = torch.rand((1 << 18 if effort.small else UPLOAD_BYTES) // 4)

    def there_and_back() -> None:
        x.to(REMOTE).cpu()

    def timed(**settings: int) -> tuple[float, float]:
        with connected_over(conditions, threads=effort.threads, **settings) as link:
            there_and_back()
            there_and_back()  # opens the parallel connections
            return median_of(there_and_back, effort.times(4)), link.measured

    alone = timed(parallel_connections=1)[0] if conditions.bits_per_second > GIGABIT else 0.0
    seconds, round_trip = timed()
    least = 2 * x.nbytes * 8 / conditions.bits_per_second + round_trip
    figures = {"at least ms": least * 1e3, "ours ms": seconds * 1e3}
    return Outcome(seconds / least, figures | ({"one connection ms": alone * 1e3} if alone else {}))


def case(name: str, bar: float | None, conditions: Conditions, what: Callable[..., Outcome], *more: Config) -> Case:
    return Case(name, bar, partial(what, conditions, *more))


CASES = (
    case("decode_30_ms", 1.05, Conditions(0.03), decoding, {}),
    case("decode_10_ms", None, Conditions(0.01), decoding, {}),
    case("decode_1_gbit", None, Conditions(0.0, GIGABIT), decoding, {}),
    case("decode_30_ms_1_gbit", None, Conditions(0.03, GIGABIT), decoding, {}),
    case("toy_decode_30_ms", None, Conditions(0.03), decoding, TOY),
    case("upload_1_gbit", None, Conditions(0.0, GIGABIT), upload),
    case("upload_10_ms_1_gbit", None, Conditions(0.01, GIGABIT), upload),
    case("upload_10_gbit", None, Conditions(0.0, 10 * GIGABIT), upload),
    case("upload_10_gbit_2.5_each", None, Conditions(0.0, 10 * GIGABIT, 2.5 * GIGABIT), upload),
)

if __name__ == "__main__":
    main("Slow links", CASES)
