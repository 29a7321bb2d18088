"""Ctrl-C at random moments of ordinary work, and a second one up to two seconds later."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable, Iterator

import attrs
import torch

import djinn
from djinn_client.runtime import client

DEVICE = "remote_accelerator:0"
SECOND_SECONDS = 2.0  # maximum delay of the second Ctrl-C
UPLOAD_BYTES = 48 << 20


@attrs.define
class Trial:
    """One or two presses of Ctrl-C during work.

    Attributes:
        moment: seconds of work before the first press.
        raised: seconds from each press to its exception.
        idle: seconds from the last exception until the executor was idle.
        wrong: faults of tensors, or "".
    """

    work: str
    moment: float
    raised: list[float] = attrs.field(factory=list)
    idle: float = 0.0
    wrong: str = ""


class Works:
    """Endless programs by name."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        layer = torch.nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, dropout=0.0)
        self.model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).to(DEVICE)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.matrix = torch.full((400, 400), 0.002, device=DEVICE)
        self.source = torch.ones(UPLOAD_BYTES // 4)
        self.fresh = 0

    def training(self) -> Iterator[None]:
        """Train a small transformer."""
        while True:
            x = torch.randn(8, 32, 64).to(DEVICE)
            self.optimizer.zero_grad()
            loss = self.model(x).square().mean()
            loss.backward()
            self.optimizer.step()
            loss.item()
            yield

    def generation(self) -> Iterator[None]:
        """Generate tokens, each from the previous one."""
        tokens = torch.zeros(1, 1, 64, device=DEVICE)
        while True:
            with torch.no_grad():
                out = self.model(tokens)[:, -1:]
                out.argmax(-1).item()
                tokens = torch.cat([tokens, out], 1)[:, -48:]
            yield

    def upload(self) -> Iterator[None]:
        """Upload large tensors behind work that keeps the executor busy."""
        while True:
            for _ in range(20):
                self.matrix @ self.matrix
            self.source.to(DEVICE)
            yield

    def planning(self) -> Iterator[None]:
        """Run programs of new structures."""
        while True:
            self.fresh += 1
            x = torch.ones(4, device=DEVICE)
            bits = f"{self.fresh:012b}"
            for _ in range(60):
                for bit in bits:
                    x = x.sin() if bit == "1" else x.cos()
            x.sum().item()
            yield

    def waiting(self) -> Iterator[None]:
        """Run one long program."""
        while True:
            product = self.matrix
            for _ in range(4000):
                product = product @ self.matrix
            product.sum().item()
            yield


def trials(count: int, seed: int, longest: float = 3.0) -> Iterator[Trial]:
    """Yield `count` trials at random moments. Each continues the session of the previous trial."""
    chance, works = random.Random(seed), Works()
    tensors = {n: torch.full((100 + n,), float(n)).to(DEVICE) for n in range(20)}
    djinn.synchronize()
    programs: list[Callable[[], Iterator[None]]] = [
        works.training,
        works.generation,
        works.upload,
        works.planning,
        works.waiting,
    ]
    for number in range(count):
        program = programs[number % len(programs)]
        trial = Trial(program.__name__, chance.uniform(0.0, longest))
        _run(trial, program, chance.uniform(0.0, SECOND_SECONDS))
        trial.wrong = trial.wrong or _wrong_of(tensors)
        yield trial
        if trial.work == "training":
            works.__init__()  # type: ignore[misc] # a step that was stopped leaves weights that say so


def _run(trial: Trial, program: Callable[[], Iterator[None]], second: float) -> None:
    pressed: list[float] = []

    def press() -> None:
        for pause in (trial.moment, second):
            time.sleep(pause)
            pressed.append(time.monotonic())
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    caught: list[float] = []
    thread = threading.Thread(target=press)
    steps = program()
    try:
        try:
            thread.start()
            while True:
                next(steps)
        except KeyboardInterrupt:
            caught.append(time.monotonic())
        while thread.is_alive() or time.monotonic() - pressed[-1] < 0.2:  # the second press comes during this wait
            torch.ones(2, device=DEVICE).sum().item()
    except KeyboardInterrupt:
        caught.append(time.monotonic())
    thread.join()
    if len(caught) == 1 and pressed[1] > caught[0]:
        trial.wrong = "the second Ctrl-C raised no exception"
    trial.raised = [came - went for came, went in zip(caught, pressed, strict=False)]
    session = client.context.session
    replies = session.executors.current[0].replies if session is not None else None
    while session is not None and replies is not None and replies.pending and not session.lost:
        replies.read_arrived()
        time.sleep(0.01)
    trial.idle = time.monotonic() - caught[-1]
    if torch.ones(2, device=DEVICE).sum().item() != 2.0:
        trial.wrong = "the next op is wrong"


def _wrong_of(kept: dict[int, torch.Tensor]) -> str:
    """Return a fault after a trial, or "": an earlier tensor has changed, or the session is lost."""
    for number, tensor in kept.items():
        if tensor.tolist() != [float(number)] * (100 + number):
            return f"tensor {number} has changed"
    session = client.context.session
    if session is None or session.lost:
        return "the session is lost"
    return ""
