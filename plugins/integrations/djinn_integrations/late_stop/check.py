"""A stop check whose replies arrive some steps later. Surplus steps are undone, so that results are unchanged."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import attrs
import torch

from djinn.compat import LazyTensor
from djinn_client.interception.async_fetch import Pending, fetch_later
from djinn_client.interception.device.random_state import copy_state as keep_random_state
from djinn_client.interception.device.random_state import set_state as restore_random_state
from djinn_integrations.late_stop.caches import TruncatableCache
from djinn_integrations.late_stop.pace import StepTimes


@attrs.frozen
class _Step:
    """A step of `generate()`.

    Attributes:
        number: number of the step, from 1.
        reply: pending reply to its stop check.
        random: random state after the step.
    """

    number: int
    reply: Pending
    random: LazyTensor


class LateStopCheck:
    """Replacement of transformers' `StopCheck` for one call of `generate()`.

    Attributes:
        steps: number of steps whose check was sent.
    """

    def __init__(
        self,
        prompt: torch.Tensor,
        max_length: int | None,
        streamer: Any,
        cache: TruncatableCache | None,
        pace: StepTimes,
        may_go_on: Callable[[int], bool],
    ) -> None:
        """Create the check of a call.

        Args:
            prompt: token ids of the prompts.
            max_length: length at which sequences end, or None.
            streamer: receives the tokens of each step, or None.
            cache: cache whose surplus steps must be undone, or None.
            pace: durations of steps.
            may_go_on: function that returns True if sequences of this length may continue before the reply to their check.
        """
        self.steps = 0
        self._prompt = prompt
        self._tokens: list[torch.Tensor] = []
        self._max_length = max_length
        self._streamer = streamer
        self._cache = cache
        self._pace = pace
        self._may_go_on = may_go_on
        self._pending_steps: deque[_Step] = deque()
        self._last_step: _Step | None = None
        self._broken_off = False
        self._failed = False

    def __call__(self, unfinished_sequences: torch.Tensor, tokens: torch.Tensor, length: int) -> bool:
        """Send the check of this step. Return True to end the loop.

        The loop ends at `max_length`, or if a reply shows that the sequences were finished some steps ago.

        Args:
            unfinished_sequences: 1 for each sequence that is not finished, otherwise 0.
            tokens: the step's tokens.
            length: length of the sequences.
        """
        self._pace.record_issued()
        self.steps += 1
        if self._cache is not None:
            self._cache.step()
        self._tokens.append(tokens)
        random = keep_random_state()
        flag: Any = unfinished_sequences.max() == 0
        requests: list[Any] = [flag] if self._streamer is None else [flag, tokens]
        self._pending_steps.append(_Step(self.steps, fetch_later(requests), random))
        if self._max_length is not None and length >= self._max_length:
            return True
        self._read_replies(self._pace.lateness() if self._may_go_on(length) else 0)
        self._pace.begin_next()
        return self._last_step is not None

    def was_surplus(self) -> bool:
        """Wait for the pending checks. Return True if the step that just raised an error was surplus.

        Raises:
            RemoteError: an earlier step failed, whose error the program would have got first.
        """
        if self._failed:
            return False
        self._read_replies(0)
        self._broken_off = self._last_step is not None
        return self._broken_off

    def finish(self) -> int:
        """Wait for the remaining replies, and undo surplus steps. Return the number of steps to remove from the outputs."""
        self._read_replies(0)
        if self._last_step is not None and (self._broken_off or self._last_step.number < self.steps):
            self._roll_back_to(self._last_step)
            return max(self.steps - self._last_step.number, 1)
        if self._cache is not None:
            self._cache.release()
        return 0

    def without_surplus(self, *recorded: Any) -> tuple[Any, ...]:
        """Return the sequences and the outputs `recorded` of all steps, without the surplus steps."""
        assert self._last_step is not None
        length = self._last_step.number
        # Join the tokens of each step, because the loop's last sequences are invalid if a surplus step failed.
        sequences = torch.cat([self._prompt, torch.stack(self._tokens[:length], dim=-1)], dim=-1)
        return (sequences, *(record[:length] if record else record for record in recorded))

    def _read_replies(self, lateness: int) -> None:
        """Read the replies that have arrived. Wait until at most `lateness` replies are pending."""
        while self._pending_steps and self._last_step is None:
            step = self._pending_steps[0]
            if len(self._pending_steps) <= lateness and not step.reply.done():
                return
            self._pending_steps.popleft()
            self._check_step(step)

    def _check_step(self, step: _Step) -> None:
        try:
            flag, *tokens = step.reply.result()
            if self._streamer is not None:
                self._streamer.put(tokens[0])
        except BaseException:
            self._failed = True
            self._roll_back_to(step)
            raise
        self._pace.record_run(step.reply.server_seconds)
        if flag.item():
            self._last_step = step
            self._pending_steps.clear()

    def _roll_back_to(self, step: _Step) -> None:
        step.reply.ignore_later_errors()
        restore_random_state(step.random)
        if self._cache is not None:
            self._cache.cut(step.number)
            self._cache.release()
