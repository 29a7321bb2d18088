"""Hugging Face's greedy `generate()` on a model of GPT-2-small's architecture, with random weights."""

from __future__ import annotations

import copy
from typing import Any

import torch

from djinn_commands.demo.task import Advance, Verdict

PROMPT_TOKENS = 16
NEW_TOKENS = 32
SEED = 1
BLOCK_GAIN = 8.0


class Generation:
    """The task that continues a prompt token by token. A remote run takes one round trip per token."""

    name = "generation"
    title = "GPT-2 small"

    def __init__(self) -> None:
        from transformers import GPT2Config, GPT2LMHeadModel

        torch.manual_seed(SEED)
        self._origin: Any = GPT2LMHeadModel(GPT2Config()).eval()
        # With the initial weights the last token always wins. Larger weights make the tokens vary.
        with torch.no_grad():
            for block in self._origin.transformer.h:
                block.mlp.c_proj.weight.mul_(BLOCK_GAIN)
        self._prompt = torch.randint(0, self._origin.config.vocab_size, (1, PROMPT_TOKENS))
        self._model: Any = None

    def move(self, device: str) -> None:
        """Move a copy of the model to `device`: 498 MB of weights."""
        self._model = copy.deepcopy(self._origin).to(device)

    def run(self, device: str, advance: Advance) -> list[int]:
        """Return the generated tokens, after the tokens of the prompt."""
        prompt = self._prompt.to(device)
        tokens = self._model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            min_new_tokens=NEW_TOKENS,
            max_new_tokens=NEW_TOKENS,
            pad_token_id=self._origin.config.eos_token_id,
            logits_processor=[_Counter(advance)],
        )
        token_ids: list[int] = tokens[0].tolist()
        return token_ids

    def compare(self, local: list[int], remote: list[int]) -> Verdict:
        """Compare the tokens. They must be identical."""
        same = sum(a == b for a, b in zip(local, remote, strict=False))
        return Verdict(local == remote, f"{same} tokens" if same == len(local) else f"{same} of {len(local)} tokens")

    def highlights(self, remote: list[int]) -> list[str]:
        """Return the first generated tokens."""
        new_tokens = remote[PROMPT_TOKENS : PROMPT_TOKENS + 4]
        return [f"{NEW_TOKENS} new tokens, of random weights: {' '.join(map(str, new_tokens))} ..."]


class _Counter:
    """A logits processor that counts steps for the progress bar, without a round trip."""

    def __init__(self, advance: Advance) -> None:
        self._advance = advance
        self._steps_done = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        del input_ids
        self._steps_done += 1
        self._advance(self._steps_done, NEW_TOKENS)
        return scores
