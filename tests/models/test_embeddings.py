"""Real all-MiniLM-L6-v2 weights embed the same sentences here and on a server."""

from __future__ import annotations

import copy

import pytest
import torch

REMOTE = "remote_accelerator:0"
SENTENCES = [
    "A remote accelerator as a local device.",
    "Weights live on the server from here on.",
    "Der Schlüsselwert-Speicher zieht nicht um.",
    "one",
    "Sentences of different lengths are padded; attention and mean leave the padding out, as this long one shows.",
]


@pytest.fixture(scope="module")
def local():
    from sentence_transformers import SentenceTransformer

    from djinn_commands.demo.embeddings import weights_folder

    return SentenceTransformer(str(weights_folder()), device="cpu", local_files_only=True)


def embed(model, device):
    return model.encode(SENTENCES, device=device, convert_to_tensor=True, show_progress_bar=False)


def test_embeddings_equal_local(over, local):
    expected = embed(local, "cpu")
    embeddings = embed(copy.deepcopy(local).to(REMOTE), REMOTE)
    assert embeddings.device == torch.device(REMOTE)
    torch.testing.assert_close(embeddings.cpu(), expected, rtol=0, atol=1e-5)


def test_similarity_is_computed_remotely(over_tcp, local):
    remote = copy.deepcopy(local).to(REMOTE)
    scores = remote.similarity(embed(remote, REMOTE), embed(remote, REMOTE))
    assert scores.device == torch.device(REMOTE)
    expected = local.similarity(embed(local, "cpu"), embed(local, "cpu"))
    torch.testing.assert_close(scores.cpu(), expected, rtol=0, atol=1e-5)
