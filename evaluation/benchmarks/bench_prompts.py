"""Prompts that repeat: executor time up to the first token over that of the first prompt (plugins/result_cache).

    python -m evaluation.benchmarks.bench_prompts [--json] [--quick] [--case same_session]

GPT-2 with random weights and prompts of 800 tokens, on a `djinn serve` with a cache of results and a store of weights. A session is a
process. The first one generates from each prompt twice. The second one builds equal weights and generates from prompts of the first session.
`common_prefix` is with `exact=False`: prompts of 850 tokens, of which 800 are those of an earlier prompt, over that one.
`other_prompts` is the time of prompts that never repeat with the cache over the time without it, on two servers alternately.
"""

from __future__ import annotations

import multiprocessing
import statistics
import sys
import time
from collections.abc import Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from evaluation.benchmarks.measuring import Case, Effort, Outcome, main
from evaluation.served import Server, served

LAYERS, TOKENS, OTHER_TOKENS = 12, 800, 50
CACHE = {"DJINN_PLUGIN_RESULT_CACHE_GIB": "2"}


def session(url: str, token: str, layers: int, tokens: int, exact: bool, pipe: Connection) -> None:
    """Reply to each prompt in `pipe` with the executor's seconds up to the first token, and with this token.

    A prompt is a pair of its number and the number of an earlier prompt, whose first tokens it has, or None.
    """
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    import djinn

    torch.set_num_threads(1)
    djinn.configure(servers=[url], token=token, disable=("local",), exact=exact)
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=layers)).eval().to("remote_accelerator:0")
    while (prompt := pipe.recv()) is not None:
        number, earlier = prompt
        ids = torch.randint(0, 50_000, (1, tokens), generator=torch.Generator().manual_seed(number))
        if earlier is not None:
            generator = torch.Generator().manual_seed(earlier)
            ids[:, :-OTHER_TOKENS] = torch.randint(0, 50_000, (1, tokens), generator=generator)[:, :-OTHER_TOKENS]
        before = djinn.stats()["server_execute_us"]
        result = model.generate(ids.to("remote_accelerator:0"), max_new_tokens=1, do_sample=False, pad_token_id=0)
        output = int(result[0, -1])
        pipe.send(((djinn.stats()["server_execute_us"] - before) / 1e6, output))


class Session:
    """A client in a process of its own."""

    def __init__(self, server: Server, layers: int, tokens: int, exact: bool = True) -> None:
        spawning: Any = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawning.Pipe()
        self._process = spawning.Process(
            target=session, args=(server.tcp, server.token, layers, tokens, exact, theirs), daemon=True
        )
        self._process.start()

    def generate(self, number: int, earlier: int | None = None) -> tuple[float, int]:
        """Return the seconds of a prompt, and the token. `earlier`: number of the prompt whose first tokens it has."""
        self._pipe.send((number, earlier))
        if not self._pipe.poll(600):
            raise RuntimeError("a session did not answer")
        result: tuple[float, int] = self._pipe.recv()
        return result

    def close(self) -> None:
        """End the process."""
        self._pipe.send(None)
        self._process.join(30)
        self._process.kill()


def _sizes(effort: Effort) -> tuple[int, int]:
    return (1, 100) if effort.small else (LAYERS, TOKENS)


def _ratio(first: Sequence[tuple[float, int]], again: Sequence[tuple[float, int]]) -> Outcome:
    if [token for _, token in first] != [token for _, token in again]:
        raise RuntimeError("an equal prompt gave another token")
    before, after = (statistics.median([seconds for seconds, _ in result]) for result in (first, again))
    return Outcome(after / before, {"first s": before, "again s": after, "prompts": len(first)})


def equal_prompts(second_session: bool, effort: Effort) -> Outcome:
    """Return the executor's time for repeated prompts, in one session or two, divided by the time of first prompts."""
    layers, tokens = _sizes(effort)
    environment = CACHE | ({"DJINN_PLUGIN_RESULT_CACHE_SECONDS": "0"} if effort.small else {})
    with served(threads=effort.threads, environment=environment) as server:
        one = Session(server, layers, tokens)
        one.generate(0)
        first, again = list[tuple[float, int]](), list[tuple[float, int]]()
        for number in range(1, effort.rounds + 1):
            first.append(one.generate(number))
            if not second_session:
                again.append(one.generate(number))
        if second_session:
            time.sleep(0 if effort.small else 5)  # the store writes beside other work
            other = Session(server, layers, tokens)
            again = [other.generate(number) for number in range(1, effort.rounds + 1)]
            other.close()
        one.close()
    return _ratio(first, again)


def common_prefix(effort: Effort) -> Outcome:
    """Return the executor's time for prompts that begin like an earlier prompt, divided by the time for the latter."""
    layers, tokens = _sizes(effort)
    environment = CACHE | ({"DJINN_PLUGIN_RESULT_CACHE_SECONDS": "0"} if effort.small else {})
    with served(threads=effort.threads, environment=environment) as server:
        one = Session(server, layers, tokens + OTHER_TOKENS, exact=False)
        one.generate(0)
        pairs = [
            (one.generate(2 * number)[0], one.generate(2 * number + 1, 2 * number)[0])
            for number in range(1, effort.rounds + 1)
        ]
        one.close()
    first, later = (statistics.median(column) for column in zip(*pairs, strict=True))
    return Outcome(later / first, {"first s": first, "later s": later, "prompts": len(pairs)})


def other_prompts(effort: Effort) -> Outcome:
    """Return the executor's time for prompts that never repeat with the cache, divided by the time without it."""
    layers, tokens = _sizes(effort)
    with (
        served(threads=effort.threads, environment=CACHE) as cached,
        served(threads=effort.threads) as plain,
    ):
        sessions = [Session(server, layers, tokens) for server in (cached, plain)]
        times: list[list[float]] = [[], []]
        for number in range(4 * effort.rounds):
            order = (0, 1) if number % 2 else (1, 0)
            for which in order:
                times[which].append(sessions[which].generate(number)[0])
        for item in sessions:
            item.close()
    with_cache, without = (statistics.median(result[2:]) for result in times)
    return Outcome(with_cache / without, {"cache s": with_cache, "plain s": without})


CASES = (
    Case("same_session", 0.05, partial(equal_prompts, False)),
    Case("second_session", 0.05, partial(equal_prompts, True)),
    Case("common_prefix", 0.3, common_prefix),
    Case("other_prompts", None, other_prompts),
)

if __name__ == "__main__":
    sys.exit(not main("A prompt that repeats, over the first one", CASES))
