"""`from_pretrained` with weights that the server has and the client lacks."""

from __future__ import annotations

import pytest
import torch
from configured import configured
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    BertConfig,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    PreTrainedTokenizerFast,
)
from transformers import MixtralForCausalLM as Mixtral

import djinn
from djinn.hooks import WeightPermissions
from djinn_core.wire import limits
from djinn_core.wire.weight_messages import SmallFilesRequest
from djinn_server.builtins.weights import FileSource
from djinn_server.weights.replies import small_files
from djinn_server.weights.weight_reader import WeightReader

REMOTE = "remote_accelerator:0"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 512,
}


def models():
    torch.manual_seed(0)
    llama = LlamaConfig(**SIZES, num_key_value_heads=2, tie_word_embeddings=True)
    # Its experts are stored one by one and computed as one tensor: transformers converts them while it loads.
    mixtral = MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=4)
    return {
        "llama": (AutoModelForCausalLM, LlamaForCausalLM(llama)),
        "mixtral": (AutoModelForCausalLM, Mixtral(mixtral)),
        "bert": (AutoModel, BertModel(BertConfig(**SIZES))),
        "checkpoint": (AutoModelForCausalLM, LlamaForCausalLM(llama)),
    }


@pytest.fixture(scope="module")
def caches(tmp_path_factory):
    """Return two hub caches: the server's with whole models, and the client's with configurations only."""
    server, client = tmp_path_factory.mktemp("server"), tmp_path_factory.mktemp("client")
    for name, (_, model) in models().items():
        for cache in (server, client):
            repository = cache / f"models--org--{name}"
            snapshot = repository / "snapshots" / COMMIT
            snapshot.mkdir(parents=True)
            (repository / "refs").mkdir()
            (repository / "refs" / "main").write_text(COMMIT)
            if cache is server and name == "checkpoint":  # as models were stored before safetensors
                torch.save(model.state_dict(), snapshot / "pytorch_model.bin")
                model.config.save_pretrained(snapshot)
            elif cache is server:
                model.save_pretrained(snapshot, max_shard_size="200KB")
            else:
                model.config.save_pretrained(snapshot)
    plain = server / "plain"
    models()["llama"][1].save_pretrained(plain, max_shard_size="200KB")
    words = Tokenizer(WordLevel({"[UNK]": 0, "a": 1, "word": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]").save_pretrained(plain)
    (plain / ".hidden.json").write_text("{}")
    return server, client


@pytest.fixture(scope="module")
def model_server(caches, tmp_path_factory, python, plain_environment):
    from servers import start_server

    folder = tmp_path_factory.mktemp("served")
    server = start_server(python.start, folder, "--models", str(caches[0]), "--threads", "1", env=plain_environment)
    with configured(connection_file=server.file):
        yield server
    server.stop()


def load(kind, name, cache, **options):
    return kind.from_pretrained(f"org/{name}", cache_dir=cache, local_files_only=True, **options)


@pytest.mark.usefixtures("model_server")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "mixtral", "bert", "checkpoint"])
def test_pretrained_outputs_equal_local_without_uploads(name, dtype, caches):
    server, client = caches
    kind, _ = models()[name]
    local = load(kind, name, server, dtype=dtype)
    djinn.init()
    djinn.reset_stats()
    remote = load(kind, name, client, dtype=dtype, device_map=REMOTE)
    total = sum(parameter.nbytes for parameter in local.parameters())
    assert {parameter.device for parameter in remote.parameters()} == {torch.device(REMOTE)}
    ids = torch.arange(24).view(2, 12)
    with torch.no_grad():
        expected, found = local(ids), remote(ids.to(REMOTE))
    assert torch.equal(found[0].cpu(), expected[0])
    stats = djinn.stats()
    assert stats["bytes_read"] >= 0.9 * total * (4 // dtype.itemsize)
    assert stats["bytes_uploaded"] < 10_000
    assert stats["bytes_sent"] < 0.1 * total + 100_000
    for (key, one), (_, other) in zip(local.state_dict().items(), remote.state_dict().items(), strict=True):
        assert torch.equal(one, other.cpu()), key


@pytest.mark.usefixtures("model_server")
def test_pretrained_model_missing_on_server_loads_from_client_folder(caches, tmp_path):
    server, client = caches
    BertModel(BertConfig(**SIZES)).save_pretrained(tmp_path)
    with pytest.raises(OSError, match="in the cached files"):
        load(AutoModel, "nothing", client, device_map=REMOTE)
    djinn.reset_stats()
    local = AutoModel.from_pretrained(tmp_path, device_map=REMOTE)  # a folder of the client
    sum(p.sum() for p in local.parameters()).item()  # the executor asks for what it lacks
    assert djinn.stats()["bytes_read"] == 0
    assert djinn.stats()["bytes_uploaded"] + djinn.stats()["bytes_recalled"] >= sum(
        p.nbytes for p in local.parameters()
    )
    load(AutoModel, "bert", server)  # no device: a model on the CPU
    assert djinn.stats()["bytes_read"] == 0


@pytest.mark.usefixtures("model_server")
@pytest.mark.parametrize("device", [REMOTE, torch.device(REMOTE), 0, None])
def test_pipeline_loads_model_onto_device(device, caches):
    from transformers import PreTrainedTokenizerFast, pipeline

    djinn.init()
    djinn.reset_stats()
    words = Tokenizer(WordLevel({f"w{number}": number for number in range(SIZES["vocab_size"])}, unk_token="w0"))
    words.pre_tokenizer = Whitespace()
    made = pipeline(
        "feature-extraction",
        "org/bert",
        tokenizer=PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0"),
        device=device,
        model_kwargs={"cache_dir": caches[1]},
        local_files_only=True,
    )
    assert made.device == torch.device(REMOTE)
    assert djinn.stats()["bytes_read"] > 100_000
    expected = load(AutoModel, "bert", caches[0])(torch.tensor([[1, 2, 3]])).last_hidden_state
    assert torch.equal(made("w1 w2 w3", return_tensors=True), expected)


@pytest.mark.usefixtures("model_server")
def test_adapter_is_read_by_server(caches, monkeypatch):
    peft = pytest.importorskip("peft")
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)  # transformers looks for adapters of each model
    server, client = caches
    local = peft.get_peft_model(load(AutoModelForCausalLM, "llama", server), peft.LoraConfig(r=4))
    with torch.no_grad():
        for name, parameter in local.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    local.save_pretrained(server / "models--org--adapter" / "snapshots" / COMMIT, save_embedding_layers=False)
    folder = client / "models--org--adapter" / "snapshots" / COMMIT
    local.peft_config["default"].save_pretrained(folder)
    djinn.init()
    model = load(AutoModelForCausalLM, "llama", client, device_map=REMOTE)
    djinn.reset_stats()
    found = peft.PeftModel.from_pretrained(model, str(folder))
    assert djinn.stats()["bytes_read"] > 0
    ids = torch.arange(12)[None]
    with torch.no_grad():
        torch.testing.assert_close(found(ids.to(REMOTE)).logits.cpu(), local.eval()(ids).logits)


def test_weights_from_setting_selects_reader(model_server, caches):
    server, client = caches
    with configured(connection_file=model_server.file, weights_from="client"):
        djinn.reset_stats()
        load(AutoModel, "bert", server, device_map=REMOTE)
        assert djinn.stats()["bytes_read"] == 0
        with pytest.raises(OSError, match=r"model\.safetensors"):
            load(AutoModel, "bert", client, device_map=REMOTE)
    with configured(connection_file=model_server.file, weights_from="server"):
        load(AutoModel, "bert", client, device_map=REMOTE)
        with pytest.raises(djinn.errors.WeightsUnavailable, match="there is no"):
            load(AutoModel, "other", _with_configuration(client), device_map=REMOTE)
    with pytest.raises(djinn.errors.ConfigurationError, match="'auto', 'server' or 'client'"):
        djinn.configure(weights_from="neither")


def _with_configuration(cache):
    """Return the cache, with the configuration of a model that the server lacks."""
    snapshot = cache / "models--org--other" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (cache / "models--org--other" / "refs").mkdir()
    (cache / "models--org--other" / "refs" / "main").write_text(COMMIT)
    BertConfig(**SIZES).save_pretrained(snapshot)
    return cache


def test_server_folder_gives_config_tokenizer_and_weights(model_server, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    local = models()["llama"][1].eval()
    with configured(connection_file=model_server.file):
        djinn.reset_stats()
        tokenizer = AutoTokenizer.from_pretrained("file:plain")
        model = AutoModelForCausalLM.from_pretrained("file:plain", device_map=REMOTE).eval()
        tokens = tokenizer("a word a", return_tensors="pt").input_ids
        assert tokens.tolist() == [[1, 2, 1]]
        with torch.no_grad():
            torch.testing.assert_close(model(tokens.to(REMOTE)).logits.cpu(), local(tokens).logits)
        assert djinn.stats()["bytes_uploaded"] < 10_000
        assert not [*tmp_path.iterdir()]
        for address in ("file:nothing", "file:../server/plain", "file:/etc"):
            with pytest.raises(djinn.errors.WeightsUnavailable):
                AutoTokenizer.from_pretrained(address)


def test_only_limited_small_files_are_read(caches, monkeypatch):
    reader = WeightReader([FileSource()], WeightPermissions((caches[0],)))
    names = {name for name, _ in reader.small_files("file:plain")}
    assert {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"} <= names
    assert not [name for name in names if name.startswith(".") or name.endswith((".safetensors", ".index.json"))]
    monkeypatch.setattr(limits, "SMALL_FILES_BYTES", 100)
    refused = small_files(reader, SmallFilesRequest("file:plain"))
    assert not refused.files
    assert "100 bytes are allowed" in refused.refused
