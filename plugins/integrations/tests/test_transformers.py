"""transformers on the device: loading, generation, pipelines and `Trainer`, with the same results as locally."""

from __future__ import annotations

import copy

import pytest
import torch
from safetensors.torch import load_file
from torch.utils import _pytree as pytree

import djinn

REMOTE = "remote_accelerator:0"
WORDS = "[PAD] [UNK] [MASK] [CLS] [SEP] the cat sat on a mat and dog ran far away from home today".split()
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
TEXT = {"vocab_size": len(WORDS), "max_position_embeddings": 64, **SIZES}


@pytest.fixture(autouse=True)
def _embedded_device(embedded):
    assert embedded == REMOTE


@pytest.fixture(scope="module")
def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "mask", "cls", "sep")}
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="[SEP]", padding_side="left", **special)


def llama(seed=0, **settings):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    tokens = {"pad_token_id": 0, "bos_token_id": 3, "eos_token_id": 4}
    model = LlamaForCausalLM(LlamaConfig(**{**TEXT, "num_key_value_heads": 2, **tokens, **settings})).eval()
    with torch.no_grad():  # with freshly initialized weights, one token wins every time
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(6)
    return model


@pytest.fixture(scope="module")
def model():
    return llama()


@pytest.fixture(scope="module")
def folder(model, tokenizer, tmp_path_factory):
    """Return a folder with the model in many small safetensors files."""
    path = tmp_path_factory.mktemp("saved")
    model.save_pretrained(path, max_shard_size="10KB")
    tokenizer.save_pretrained(path)
    assert len(list(path.glob("*.safetensors"))) > 5
    return path


def on_cpu(found):
    return pytree.tree_map_only(torch.Tensor, lambda t: t.detach().cpu(), found)


def prompt():
    tokens = torch.randint(5, len(WORDS), (2, 8), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(tokens)
    tokens[1, :3] = mask[1, :3] = 0
    return {"input_ids": tokens, "attention_mask": mask}


# --- loading --------------------------------------------------------------------------------------------------

SPLIT = {"model.embed_tokens": "cpu", "model.layers.0": REMOTE, "model.layers.1": "disk"}
SPLIT |= dict.fromkeys(("model.norm", "model.rotary_emb", "lm_head"), REMOTE)


@pytest.mark.parametrize(
    "where", [{"": REMOTE}, REMOTE, 0, "auto", SPLIT], ids=["dict", "name", "number", "auto", "split"]
)
def test_shards_follow_device_map(model, folder, where, tmp_path):
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(folder, device_map=where, offload_folder=tmp_path)
    if where is not SPLIT:
        assert {p.device for p in loaded.parameters()} == {torch.device(REMOTE)}
    with torch.no_grad():
        expected = model(**prompt()).logits
        logits = loaded(**{name: value.to(REMOTE) for name, value in prompt().items()}).logits
    torch.testing.assert_close(logits.cpu(), expected, rtol=1e-3, atol=1e-4)


def test_safetensors_are_read_onto_device(model, folder):
    from safetensors.torch import load_file

    found = load_file(folder / "model-00001-of-00011.safetensors", device=REMOTE)
    assert {t.device for t in found.values()} == {torch.device(REMOTE)}
    for name, tensor in found.items():
        assert torch.equal(tensor.cpu(), model.state_dict()[name])


# --- generating -----------------------------------------------------------------------------------------------


def assistant(device):
    return {"assistant_model": llama(1).to(device)}


WAYS = {
    "beam sampling": {"num_beams": 3, "do_sample": True, "num_return_sequences": 2},
    "sampling": {"do_sample": True, "top_p": 0.9, "min_p": 0.01, "temperature": 0.7},
    "processors": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "bad_words_ids": [[5], [6, 7]]},
    "static cache": {"cache_implementation": "static"},
    "guidance": {"guidance_scale": 1.5},
    "prompt lookup": {"prompt_lookup_num_tokens": 2},
    "assisted": assistant,
    "several ends": {"eos_token_id": [5, 7, 9, 11], "min_new_tokens": 0},
}


@pytest.mark.parametrize("name", WAYS)
def test_generate_equals_local(model, name):
    found = []
    for device in ("cpu", REMOTE):
        options = WAYS[name](device) if callable(WAYS[name]) else WAYS[name]
        rows = 1 if {"assistant_model", "prompt_lookup_num_tokens"} & options.keys() else 2
        given = {key: value[:rows].to(device) for key, value in prompt().items()}
        moved = copy.deepcopy(model).to(device)
        torch.manual_seed(3)
        tokens = moved.generate(**given, **{"do_sample": False, "max_new_tokens": 8, "min_new_tokens": 8, **options})
        assert tokens.device == torch.device(device)
        found.append(tokens.tolist())
    assert found[1] == found[0]
    assert len(set(found[0][0])) > 3, "the model says the same thing all the time: nothing is shown"


def test_generate_with_scores_and_streaming_equals_local(model):
    found = []
    for device in ("cpu", REMOTE):
        pieces = []
        streamer = type("Streamer", (), {"put": lambda _, t: pieces.append(t.tolist()), "end": lambda _: None})()  # noqa: B023
        given = {key: value[:1].to(device) for key, value in prompt().items()}
        wanted = {"return_dict_in_generate": True, "output_scores": True, "output_hidden_states": True}
        made = copy.deepcopy(model).to(device).generate(**given, **wanted, max_new_tokens=3, streamer=streamer)
        found.append(on_cpu([pieces, made.sequences, made.scores, made.hidden_states]))
    torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-3)


# --- pipelines ------------------------------------------------------------------------------------------------


def bert(kind):
    import transformers

    torch.manual_seed(0)
    return getattr(transformers, kind)(transformers.BertConfig(**TEXT)).eval()


PIPELINES = {
    "text-generation": (llama, "the cat", {"max_new_tokens": 5, "do_sample": False}),
    "text-classification": (lambda: bert("BertForSequenceClassification"), ["the cat sat", "a dog"], {"batch_size": 2}),
    "feature-extraction": (lambda: bert("BertModel"), "the cat sat", {}),
    "fill-mask": (lambda: bert("BertForMaskedLM"), "the [MASK] sat", {}),
}


@pytest.mark.parametrize("task", PIPELINES)
def test_pipelines_equal_local(tokenizer, task):
    from transformers import pipeline

    make, question, options = PIPELINES[task]
    expected = pipeline(task, model=make(), tokenizer=tokenizer, device="cpu")(question, **options)
    for device in (REMOTE, 0, None):
        remote = pipeline(task, model=make(), tokenizer=tokenizer, device=device)
        assert remote.device == torch.device(REMOTE)
        assert approximate(remote(question, **options)) == approximate(expected)


def approximate(answer):
    return pytree.tree_map_only(float, lambda number: pytest.approx(number, rel=1e-3, abs=1e-5), answer)


def test_image_pipeline_equals_local():
    from PIL import Image
    from transformers import ViTConfig, ViTForImageClassification, pipeline
    from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

    torch.manual_seed(0)
    model = ViTForImageClassification(ViTConfig(**SIZES, image_size=32, patch_size=8, num_labels=5)).eval()
    options = {"image_processor": ViTImageProcessorPil(size={"height": 32, "width": 32})}
    image = Image.linear_gradient("L").convert("RGB")
    expected = pipeline("image-classification", model=copy.deepcopy(model), device="cpu", **options)(image)
    assert approximate(pipeline("image-classification", model=model, device=REMOTE, **options)(image)) == approximate(
        expected
    )


# --- training -------------------------------------------------------------------------------------------------


class Sentences(torch.utils.data.Dataset):
    """Rows of tokens."""

    lines = torch.randint(5, len(WORDS), (24, 12), generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.lines)

    def __getitem__(self, index):
        return {"input_ids": self.lines[index], "labels": self.lines[index]}


def trainer(model, folder, steps=4, **options):
    from transformers import Trainer, TrainingArguments

    usual = {"per_device_train_batch_size": 4, "learning_rate": 1e-2, "logging_steps": 1, "save_strategy": "no"}
    usual |= {"report_to": [], "disable_tqdm": True, "seed": 3, "max_steps": steps, "output_dir": str(folder)}
    return Trainer(model, TrainingArguments(**usual | options), train_dataset=Sentences(), eval_dataset=Sentences())


def losses(trainer):
    return torch.tensor([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])


RECIPES = {
    "accumulation, checkpointing and a schedule": {
        "gradient_accumulation_steps": 2,
        "gradient_checkpointing": True,
        "max_grad_norm": 0.1,
        "warmup_steps": 2,
        "lr_scheduler_type": "cosine",
    },
    "bfloat16": {"bf16": True},
}


@pytest.mark.parametrize("name", RECIPES)
def test_trainer_losses_equal_local(name, tmp_path, capsys):
    tolerance = 3e-2 if "bf16" in RECIPES[name] else 1e-3
    found = []
    for local in (True, False):
        run = trainer(llama(), tmp_path, use_cpu=local, **RECIPES[name])
        run.train()
        assert run.args.device == run.model.device == torch.device("cpu" if local else REMOTE)
        assert run.predict(Sentences()).predictions.shape == (24, 12, len(WORDS))
        found.append([losses(run), torch.tensor(run.evaluate()["eval_loss"])])
    assert len(found[0][0]) == 4
    torch.testing.assert_close(found[1], found[0], rtol=tolerance, atol=tolerance)


def test_resumed_training_repeats_dropout(tmp_path, capsys):
    whole = trainer(llama(attention_dropout=0.3), tmp_path, save_strategy="steps", save_steps=2)
    whole.train()
    resumed = trainer(llama(attention_dropout=0.3), tmp_path)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    torch.testing.assert_close(losses(resumed)[-2:], losses(whole)[-2:], rtol=1e-6, atol=1e-6)


def test_adapter_training_equals_local():
    class LowRankLayer(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner.requires_grad_(False)
            self.down = torch.nn.Parameter(torch.full((2, inner.in_features), 0.1))
            self.up = torch.nn.Parameter(torch.zeros(inner.out_features, 2))

        def forward(self, value):
            return self.inner(value) + value @ self.down.T @ self.up.T

    found = []
    for device in ("cpu", REMOTE):
        model = llama().requires_grad_(False)
        for layer in model.model.layers:
            layer.self_attn.q_proj = LowRankLayer(layer.self_attn.q_proj)
        model = model.to(device)
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-2)
        for _ in range(2):
            optimizer.zero_grad()
            model(
                **{name: value.to(device) for name, value in prompt().items()}, labels=prompt()["input_ids"].to(device)
            ).loss.backward()
            optimizer.step()
        found.append(on_cpu(trained))
    assert len(found[0]) == 4
    torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-4)


# --- addresses of the server ----------------------------------------------------------------------------------


def test_models_are_saved_and_loaded_on_server(model, tmp_path, monkeypatch):
    from transformers import AutoModelForCausalLM

    monkeypatch.chdir(tmp_path)
    address, expected = f"file:{tmp_path}/there", {name: one.clone() for name, one in model.state_dict().items()}
    saved = copy.deepcopy(model).to(REMOTE)
    djinn.synchronize()
    djinn.reset_stats()
    saved.save_pretrained(address, max_shard_size="10KB")
    assert djinn.stats()["bytes_received"] < 5000
    assert {path.suffix for path in (tmp_path / "there").iterdir()} == {".safetensors"}
    whole = {}
    for path in (tmp_path / "there").iterdir():
        whole |= load_file(path)
    assert {name: torch.equal(one, expected[name]) for name, one in whole.items()} == dict.fromkeys(expected, True)
    djinn.reset_stats()
    loaded = AutoModelForCausalLM.from_pretrained(address, device_map=REMOTE)
    djinn.synchronize()
    assert djinn.stats()["bytes_sent"] < 20_000
    assert djinn.stats()["bytes_received"] < 5000
    for found in (loaded, AutoModelForCausalLM.from_pretrained(address)):
        assert all(torch.equal(one.cpu(), expected[name]) for name, one in found.state_dict().items())
    assert found.device == torch.device("cpu")


def test_trainer_checkpoints_stay_on_server(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    address, options = f"file:{tmp_path}/there", {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 2}
    whole = trainer(llama(attention_dropout=0.3), address, **options)
    djinn.reset_stats()
    whole.train()
    assert djinn.stats()["bytes_received"] < 40_000
    kept = {path.name: sorted(file.name for file in path.iterdir()) for path in (tmp_path / "there").iterdir()}
    assert kept == {f"checkpoint-{n}": ["model.safetensors", "optimizer.pt.safetensors"] for n in (3, 4)}
    resumed = trainer(llama(attention_dropout=0.3), tmp_path / "other")
    djinn.reset_stats()
    resumed.train(resume_from_checkpoint=f"{address}/checkpoint-3")
    assert djinn.stats()["bytes_received"] < 20_000
    assert losses(resumed)[-1] == losses(whole)[-1]
