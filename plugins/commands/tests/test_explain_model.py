"""`djinn explain` on models without weights: configurations and functions, and its errors."""

from __future__ import annotations

import json
import textwrap
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

SHOP = """
    import torch
    from torch import nn

    def tower():
        layers = [nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(6)]
        model = nn.Sequential(*layers)
        assert next(model.parameters()).is_meta
        return model, torch.zeros(3, 8)

    def looks():
        class Looks(nn.Linear):
            def forward(self, x):
                return super().forward(x) if not x.any() else x
        return Looks(8, 8), {"input": torch.zeros(3, 8)}["input"]

    def named():
        return nn.MultiheadAttention(8, 2), {name: torch.zeros(3, 8) for name in ("query", "key", "value")}

    def computes():
        class Computes(nn.Linear):
            def forward(self, x):
                return x if super().forward(x).sum() > 0 else -x
        return Computes(8, 8), torch.zeros(3, 8)

    def nothing():
        return 1

    def alone():
        return nn.Linear(2, 2)

    def fails():
        raise KeyError("what was not there")

    def wrong():
        return nn.Linear(2, 2), torch.zeros(3, 8)
"""
LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 99, "hidden_size": 32,
    "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "max_position_embeddings": 64,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


@pytest.fixture
def models_folder(tmp_path, monkeypatch) -> Path:
    """Write a module with model functions, and configurations, into the working directory."""
    (tmp_path / "shop_of_models.py").write_text(textwrap.dedent(SHOP))
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "whisper.json").write_text(json.dumps({"model_type": "nobody_knows_this"}))
    (tmp_path / "own.json").write_text(json.dumps(LLAMA | {"architectures": ["OwnModel"]}))
    (tmp_path / "broken.json").write_text("{")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def explain(*arguments: str) -> Result:
    (djinn,) = entry_points(group="console_scripts", name="djinn")
    return CliRunner().invoke(djinn.load(), ["explain", *arguments])


def explain_json(*arguments: str) -> dict:
    done = explain(*arguments, "--json")
    assert done.exit_code == 0, done.output
    (program,) = json.loads(done.stdout)
    return program


@pytest.mark.usefixtures("embedded", "models_folder")
@pytest.mark.parametrize(("step", "queries"), [("forward", 16), ("decode", 1), ("train", 16)])
def test_explain_configuration_applies_step_and_sizes(step: str, queries: int) -> None:
    told = explain_json(".", "--step", step, "--tokens", "16", "--batch", "2", "--until", "estimate")
    assert told["annotate"]["workload"] == ("training" if step == "train" else "llm")
    attention = next(m for m in told["annotate"]["patterns"] if m["pattern"] == "attention")
    assert attention["details"]["queries"] == queries
    if step == "train":
        assert [part["name"] for part in told["modules"]["parts"]][-1] == "optimizer"
    else:
        assert told["modules"]["class"] == "LlamaForCausalLM"
        assert told["modules"]["parts"][0]["parts"][-2]["count"] == 4


@pytest.mark.usefixtures("embedded", "models_folder")
def test_explain_calls_function_for_model_and_inputs(models_folder: Path) -> None:
    done = explain("shop_of_models:tower", "--until", "estimate", "--picture", "tower.svg")
    assert done.exit_code == 0, done.output
    assert "432 parameters, without weights" in done.stderr
    assert "0-5 x6" in (models_folder / "tower.svg").read_text()
    done = explain("shop_of_models:tower", "--until", "annotate")
    assert "0-5 x6  Sequential" in done.stdout
    assert "1  Sequential" in explain("shop_of_models:tower", "--until", "annotate", "--unfold").stdout
    assert explain_json("shop_of_models:named")["modules"]["class"] == "MultiheadAttention"


@pytest.mark.usefixtures("embedded", "models_folder")
def test_data_dependent_model_gets_zeros() -> None:
    done = explain("shop_of_models:looks", "--until", "annotate")
    assert done.exit_code == 0, done.output
    assert "the plan assumes zeros" in done.stderr
    assert "linear" in done.stdout


@pytest.mark.usefixtures("embedded", "models_folder")
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["shop_of_models:nothing"], "returned int: let it return a torch.nn.Module"),
        (["shop_of_models:alone"], "the inputs of Linear are unknown. Let shop_of_models:alone also return"),
        (["shop_of_models:fails"], "raised KeyError"),
        (["shop_of_models:computes"], "(`return x if super().forward(x).sum() > 0 else -x`)"),
        (
            ["shop_of_models:wrong"],
            "failed with the traceback above. Correct the model, or the inputs that shop_of_models:wrong returns with it: 0=float32[3, 8]",
        ),
        (
            ["shop_of_models:towr"],
            "choose one of its functions, alone, computes, fails, looks, named, nothing, tower, wrong",
        ),
        (["shop_of_modls:tower"], "the module 'shop_of_modls' is neither installed"),
        (["shop_of_models:tower", "an-argument"], "is not a script, and only a script takes arguments"),
        (["shop_of_models:tower", "--step", "decode"], "does not take `input_ids` with `past_key_values`"),
        (["shop_of_models:tower", "--picture", "a.png"], "no renderer writes files that end in .png"),
        (["shop_of_models:tower", "--program", "2"], "choose a number from 1 to 1"),
        (["shop_of_models.py", "--batch", "3"], "To pass an option to the script, write it after --"),
        (["nowhere.json"], "there is no file nowhere.json"),
        (["nowhere.py"], "there is no file nowhere.py"),
        (["whisper.json"], "cannot read the configuration whisper.json"),
        (["broken.json"], "cannot read the configuration broken.json"),
        (["own.json"], "has no model 'OwnModel'"),
    ],
)
def test_invalid_arguments_are_named(arguments: list[str], said: str) -> None:
    done = explain(*arguments)
    assert done.exit_code != 0
    assert said in " ".join(done.output.replace("\n", " ").split())
    assert not isinstance(done.exception, AssertionError)
