"""Concurrent requests: sessions that decode with the same weights, with and without `--batch-sessions`, and threads of one program.

    python -m evaluation.benchmarks.bench_batching [--json] [--quick] [--case processor_gpt2]

The model has the size of GPT-2-small and random weights, which the server reads, so that the sessions share them.
`gpt2` has GPT-2-small's 12 layers. `wide` has four layers and as many weights, so that clients record less. Prompts and
caches differ in length.

`processor`: the executor's processor time per token. Recorded frames of a client are replayed by eight sessions inside
the executor's process, so the figure does not depend on other load or on the cost of clients. `tokens`: time per token
of eight client processes that wait for each token. `alone`: one such client. All values are batched divided by
unbatched; a bar of 0.4 means 2.5 times as many tokens.

`threads`: eight threads of a program send requests of 8 to 128 tokens, one by one, to one encoder on an executor. The
value is their time divided by the time of the same threads and encoder without Djinn. `base` has the shape of BERT-base,
and `small` four layers of width 256; `long` sends four texts of 128 tokens per request. `rounded` is with `exact=False`.
`processor` is the same ratio of processor time, of client and executor together. It says less about a busy machine.
"""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import attrs
import torch

import djinn
from djinn_client.runtime.executor_link import ExecutorLink
from djinn_core.hookspecs.transports import Frame, Limits
from djinn_core.registry.builtin_plugins import builtin_plugins
from djinn_core.registry.kinds import EXECUTOR_KINDS
from djinn_core.registry.registry import load_registry
from djinn_core.registry.selection import Selection
from djinn_core.wire.messages import Completed, Goodbye, Submit, decode, encode
from djinn_server.builtins.cpu import CpuRuntime
from djinn_server.context import ExecutorContext
from djinn_server.launch.executor_config import EVERYTHING
from djinn_server.recovery.executor_channel import PlainExecutorChannel
from djinn_server.run_strategies import begin_strategies
from djinn_server.session import ExecutorSession
from djinn_server.shared_device import SharedDevice
from djinn_server.weights.weight_reader import WeightReader
from djinn_strategies.batches import Batches
from evaluation.benchmarks.bench_balance import REMOTE, Clients, clients, processor_seconds
from evaluation.benchmarks.measuring import Case, Effort, Outcome, main
from evaluation.served import served

SESSIONS = 8
TEXTS = 3  # number of recorded texts of different lengths
SECONDS = 20.0  # seconds of each turn of the clients
KNOWN, NEW = 28, 24  # warm-up tokens, and measured tokens
TEXT = 64  # length of a client's text in tokens
REQUESTS, LENGTHS = 400, 24  # of threads
ENCODERS: dict[str, dict[str, int]] = {
    "base": {},
    "small": {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024},
    "tiny": {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64},
}
SMALL = {"n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 1000}
MODELS: dict[str, dict[str, int]] = {"gpt2": {}, "wide": {"n_layer": 4, "n_embd": 1280, "n_head": 20}}
FORKING = multiprocessing.get_context("fork")


def model_of(config: dict[str, int], device: str) -> Any:
    """Return a GPT-2 model of this configuration on `device`. On the meta device, it has no weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    with torch.device(device):
        return GPT2LMHeadModel(GPT2Config(**config)).eval()


@contextmanager
def saved_weights(config: dict[str, int]) -> Iterator[str]:
    """Yield a folder with the saved weights of a model."""
    from safetensors.torch import save_file

    with tempfile.TemporaryDirectory() as folder:
        weights = model_of(config, "cpu").state_dict()
        del weights["lm_head.weight"]  # tied to the embedding
        save_file({name: weight.contiguous() for name, weight in weights.items()}, Path(folder) / "model.safetensors")
        yield folder


def tokens_of(folder: str, config: dict[str, int], length: int) -> Iterator[int]:
    """Yield greedily decoded tokens after a prompt of `length` tokens. Each token is fetched."""
    model = model_of(config, "meta")
    model.load_state_dict(dict(djinn.open_weights(f"file:{folder}", device=0)), assign=True, strict=False)
    model.tie_weights()
    prompt = (torch.arange(length)[None] % 50).to(REMOTE)
    while True:
        inputs, cache = prompt, None
        for _ in range(TEXT):
            with torch.no_grad():
                result = model(inputs, past_key_values=cache, use_cache=True)
            inputs, cache = result.logits[:, -1:].argmax(-1), result.past_key_values
            yield int(inputs.item())


# --- in the executor's process ----------------------------------------------------------------------------------

Sent = tuple[bytes, tuple[bytes, ...]]


def record(folder: str, config: dict[str, int], length: int, told: Connection) -> None:
    """Decode a text, and send two lists of recorded frames to `told`: of the warm-up and of the measured tokens."""
    torch.set_num_threads(1)
    messages: list[Sent] = []
    plain, sending = ExecutorLink.send, threading.local()

    def noting(link: ExecutorLink, frame: Frame) -> None:
        if getattr(sending, "link", None) is not link:  # `send` calls itself
            messages.append((bytes(frame.head), tuple(bytes(part) for part in frame.body)))
        sending.link = link
        try:
            plain(link, frame)
        finally:
            sending.link = None

    ExecutorLink.send = noting  # type: ignore[method-assign]
    djinn.configure(executor="inline", exact=False)
    tokens = tokens_of(folder, config, length)
    for _ in range(KNOWN):
        next(tokens)
    warm_up_count = len(messages)
    for _ in range(NEW):
        next(tokens)
    told.send((messages[:warm_up_count], messages[warm_up_count:]))
    djinn.shut_down()


def in_process(work: Callable[..., None], *given: object) -> Any:
    """Return the result of `work` in a separate process."""
    ours, theirs = FORKING.Pipe()
    child = FORKING.Process(target=work, args=(*given, theirs), daemon=True)
    child.start()
    result = ours.recv()
    child.join()
    return result


class ReplayChannel:
    """The client's end of a session that replays recorded frames."""

    def __init__(self, known: Sequence[Sent], new: Sequence[Sent]) -> None:
        self.limits = Limits()
        self.answered = threading.Semaphore(0)
        self.failed = False
        self._parts = [known, new, [(encode(Goodbye()), ())]]
        self._frames: Iterator[Sent] = iter(())
        self._go = threading.Semaphore(0)

    def release_part(self) -> int:
        """Let the session send its next part of the frames. Return the number of replies to expect."""
        self._go.release()
        return sum(isinstance(decode(head), Submit) for head, _ in self._parts[0])

    def receive(self, timeout: float | None = None) -> Frame:
        """As `Connection.receive`."""
        result = next(self._frames, None)
        if result is None:
            if not self._go.acquire(timeout=timeout):
                raise TimeoutError
            self._frames = iter(self._parts.pop(0))
            result = next(self._frames)
        return Frame(result[0], [memoryview(bytearray(part)) for part in result[1]])

    def send(self, frame: Frame) -> None:
        """As `Connection.send`."""
        message = decode(frame.head)
        if isinstance(message, Completed):
            self.failed |= bool(message.failures)
            self.answered.release()


def work(channels: Sequence[ReplayChannel]) -> None:
    """Let all sessions send their next part, and wait for the replies."""
    answers = [channel.release_part() for channel in channels]
    for channel, count in zip(channels, answers, strict=True):
        for _ in range(count):
            channel.answered.acquire()


def replay(
    texts: Sequence[tuple[Sequence[Sent], Sequence[Sent]]], sessions: int, batched: bool, told: Connection
) -> None:
    """Replay frames in several sessions. Send processor time and time per token, and mean batch size, to `told`."""
    torch.set_num_threads(1)
    registry = load_registry(Selection(), builtins=builtin_plugins(), kinds=EXECUTOR_KINDS)
    weights = WeightReader(registry.weight_sources, EVERYTHING.permissions, registry.weight_formats)
    context = ExecutorContext(SharedDevice(CpuRuntime()), weights=weights)
    strategy = Batches()
    if batched:
        begin_strategies(context, [strategy])
    channels = [ReplayChannel(*texts[number % len(texts)]) for number in range(sessions)]
    for item in channels:
        threading.Thread(target=ExecutorSession(context).serve, args=(PlainExecutorChannel(item),), daemon=True).start()
    work(channels)
    start, processor = time.perf_counter(), time.process_time()
    counts, before = strategy.counts, attrs.evolve(strategy.counts)
    work(channels)
    if any(item.failed for item in channels):
        raise RuntimeError("an op failed")
    results = [(time.process_time() - processor), (time.perf_counter() - start)]
    batches = counts.batches - before.batches
    size = (counts.batched_submissions - before.batched_submissions) / batches if batches else 1.0
    told.send((*[item / (NEW * sessions) for item in results], size))


@cache
def record_texts(name: str, small: bool) -> Sequence[tuple[Sequence[Sent], Sequence[Sent]]]:
    """Return the recorded frames of each text: of its warm-up and of its measured tokens."""
    config = SMALL if small else MODELS[name]
    folder = STACK.enter_context(saved_weights(config))
    return [in_process(record, folder, config, 8 + 5 * number) for number in range(TEXTS)]


def processor(name: str, sessions: int, effort: Effort) -> Outcome:
    """Return the executor's processor time per token, batched divided by unbatched."""
    texts = record_texts(name, effort.small)
    results: dict[bool, list[tuple[float, float, float]]] = {False: [], True: []}
    for turn in range(effort.rounds):
        for batched in (False, True) if turn % 2 else (True, False):
            results[batched].append(in_process(replay, texts, sessions, batched))
    turns, batches = (
        [statistics.median(column) for column in zip(*results[way], strict=True)] for way in (False, True)
    )
    return Outcome(
        batches[0] / turns[0],
        {
            "in turns ms": turns[0] * 1e3,
            "in batches ms": batches[0] * 1e3,
            "elapsed": batches[1] / turns[1],
            "sessions a batch": batches[2],
        },
    )


# --- with clients -----------------------------------------------------------------------------------------------


def connect(settings: dict[str, Any], folder: str, config: dict[str, int], length: int) -> Callable[[], object]:
    """Connect this process, and return a step: decoding one token."""
    djinn.configure(**settings)
    tokens = tokens_of(folder, config, length)
    return lambda: next(tokens)


@contextmanager
def serving(folder: str, config: dict[str, int], sessions: int, *options: str) -> Iterator[Clients]:
    """Yield the clients of one executor."""
    with served("--models", folder, "--store-gib", "0", *options, threads=1) as running:
        settings = {"servers": [running.tcp], "token": running.token, "disable": ("local",), "exact": False}
        with clients(
            [partial(connect, settings, folder, config, 8 + 5 * number) for number in range(sessions)]
        ) as result:
            yield result


def tokens(name: str, sessions: int, effort: Effort) -> Outcome:
    """Return seconds per token of all clients together, batched divided by unbatched."""
    import transformers.models.gpt2.modeling_gpt2  # noqa: F401 - once, and not in each client

    seconds = 0.5 if effort.small else SECONDS / 2 if effort.quick else SECONDS
    config = SMALL if effort.small else MODELS[name]
    rates: dict[str, list[float]] = {"turns": [], "batches": []}
    with ExitStack() as stack:
        folder = stack.enter_context(saved_weights(config))
        ways = {
            "turns": stack.enter_context(serving(folder, config, sessions)),
            "batches": stack.enter_context(serving(folder, config, sessions, "--batch-sessions")),
        }
        for result in ways.values():
            result.steps(seconds)  # until all templates are known
        for turn in range(effort.rounds):
            for way in ways if turn % 2 else reversed(ways):
                rates[way].append(ways[way].steps(seconds))
    turns, batches = statistics.median(rates["turns"]), statistics.median(rates["batches"])
    return Outcome(turns / batches, {"in turns tokens/s": turns, "in batches tokens/s": batches})


# --- threads of one program -------------------------------------------------------------------------------------


def encoder_of(name: str) -> torch.nn.Module:
    """Return an encoder with random weights."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    return BertModel(BertConfig(**ENCODERS[name])).eval()  # type: ignore[no-any-return]


def answers(
    encoder: torch.nn.Module, device: str, requests: Sequence[torch.Tensor]
) -> tuple[float, list[torch.Tensor]]:
    """Return the seconds that `SESSIONS` threads take for all requests, and the answers."""
    results: dict[int, torch.Tensor] = {}
    pending = iter(range(len(requests)))
    lock = threading.Lock()

    def serve() -> None:
        torch.set_num_threads(1)
        while True:
            with lock:
                number = next(pending, None)
            if number is None:
                return
            with torch.no_grad():
                results[number] = encoder(requests[number].to(device)).last_hidden_state[:, 0].cpu()

    threads = [threading.Thread(target=serve) for _ in range(SESSIONS)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - start, [results[number] for number in range(len(requests))]


def time_threads(name: str, batch: int, exact: bool, effort: Effort, told: Connection) -> None:
    """Measure local and remote threads alternately. Send a row of seconds and processor seconds per round to `told`."""
    torch.set_num_threads(1)
    count = SESSIONS if effort.small else REQUESTS // 8 if effort.quick else REQUESTS
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(8, 129, (LENGTHS,), generator=generator).tolist() if batch == 1 else [128]
    requests = [
        torch.randint(0, 1000, (batch, lengths[number % len(lengths)]), generator=generator)
        for number in range(count // batch)
    ]
    rows = []
    with served(threads=1) as running:
        djinn.configure(servers=[running.tcp], token=running.token, disable=("local",), exact=exact)
        local, remote = encoder_of(name), encoder_of(name).to(REMOTE)
        for _ in range(2):
            answers(remote, REMOTE, requests[: 4 * SESSIONS])
        (executor,) = [item.process for item in djinn.compat.coordinator().executors]
        for _ in range(effort.rounds):
            begun = time.process_time()
            seconds, expected = answers(local, "cpu", requests)
            middle, before = time.process_time(), processor_seconds(executor)
            ours, result = answers(remote, REMOTE, requests)
            seconds_spent = time.process_time() - middle + processor_seconds(executor) - before
            rows.append((seconds, ours, middle - begun, seconds_spent))
            for item, other in zip(result, expected, strict=True):
                torch.testing.assert_close(item, other, rtol=0.0 if exact else 1e-3, atol=0.0 if exact else 1e-4)
        djinn.shut_down()
    told.send(rows)


def requests(name: str, batch: int, exact: bool, effort: Effort) -> Outcome:
    """Return the time of threads with a remote encoder, divided by their time with a local encoder."""
    rows = in_process(time_threads, "tiny" if effort.small else name, batch, exact, effort)
    local, ours, alone, seconds_spent = (statistics.median(column) for column in zip(*rows, strict=True))
    figures = {
        "local s": local,
        "remote s": ours,
        "processor": seconds_spent / alone,
        "local processors": alone / local,
    }
    return Outcome(statistics.median([row[1] / row[0] for row in rows]), figures)


STACK = ExitStack()
THREADS = tuple(
    Case(f"threads_{case}", bar, partial(requests, name, batch, exact))
    for case, name, batch, exact, bar in (
        ("base", "base", 1, True, 1.1),
        ("base_rounded", "base", 1, False, 0.8),
        ("long", "base", 4, True, 1.1),
        ("long_rounded", "base", 4, False, 0.8),
        ("small", "small", 1, True, None),
        ("small_rounded", "small", 1, False, None),
    )
)
CASES = THREADS + tuple(
    Case(f"{kind}_{name}", bar, partial(measure, name, sessions))
    for kind, measure, sessions, bar in (
        ("processor", processor, SESSIONS, 0.4),
        ("processor_alone", processor, 1, 1.02),
        ("tokens", tokens, SESSIONS, 0.4),
        ("tokens_alone", tokens, 1, 1.02),
    )
    for name in MODELS
)

if __name__ == "__main__":
    with STACK:
        main("Requests that meet", CASES)
