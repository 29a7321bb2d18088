"""sentence-transformers uses the remote device by default; cross-encoders and losses work on it."""

from __future__ import annotations

import pytest
import torch

REMOTE = "remote_accelerator:0"
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # names changed between versions
WORDS = "[PAD] [UNK] [CLS] [SEP] the cat sat on a mat and dog ran far".split()
SENTENCES = ["the cat sat on a mat", "a dog ran far", "the dog sat", "far and on"]


@pytest.fixture(autouse=True)
def _embedded_device(embedded):
    assert embedded == REMOTE


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with a small random BERT that scores pairs, and a tokenizer of few words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep")}
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}
    torch.manual_seed(0)
    config = BertConfig(vocab_size=len(WORDS), max_position_embeddings=32, num_labels=1, **sizes)
    path = tmp_path_factory.mktemp("bert")
    BertForSequenceClassification(config).save_pretrained(path)
    PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(path)
    return str(path)


def test_cross_encoder_scores_equal_local(folder, monkeypatch):
    from sentence_transformers import CrossEncoder
    from transformers import BertForSequenceClassification

    told, load = [], BertForSequenceClassification.from_pretrained

    def load_recording_map(*args, device_map=None, **options):
        told.append(device_map)
        return load(*args, device_map=device_map, **options)

    monkeypatch.setattr(BertForSequenceClassification, "from_pretrained", load_recording_map)
    pairs = [(SENTENCES[0], SENTENCES[2]), (SENTENCES[1], SENTENCES[3])]
    expected = CrossEncoder(folder, device="cpu").predict(pairs)
    remote = CrossEncoder(folder)
    assert next(remote.model.parameters()).device == torch.device(REMOTE)
    assert told == [None, torch.device(REMOTE)]  # the model was loaded to the device, not moved
    assert remote.predict(pairs) == pytest.approx(expected, rel=1e-4)


def test_pair_training_losses_equal_local(folder):
    from sentence_transformers import SentenceTransformer, losses

    found = []
    for device in ("cpu", None):
        model = SentenceTransformer(folder, device=device).eval()
        assert model.device == torch.device(device or REMOTE)
        ranking = losses.MultipleNegativesRankingLoss(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        curve = []
        for _ in range(3):
            features = [model.tokenize(side) for side in (SENTENCES, SENTENCES[::-1])]
            moved = [
                {name: value.to(model.device) if hasattr(value, "to") else value for name, value in side.items()}
                for side in features
            ]
            loss = ranking(moved, None)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            curve.append(loss.detach().cpu())
        found.append(torch.stack(curve))
    torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-4)
