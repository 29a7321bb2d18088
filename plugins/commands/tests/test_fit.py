"""`djinn plan` without a cluster, for models on the present servers. The short form of `python -m evaluation fit`."""

from __future__ import annotations

import json

import attrs
import pytest
import torch
from click.testing import CliRunner
from long_forms import long_or

import djinn
from djinn.errors import ConfigurationError
from djinn.planning import DeviceCapabilities
from djinn_client.runtime.plugins import open_plugins
from djinn_commands.planning import fit
from djinn_commands.planning.model import Step, built_model
from djinn_commands.planning.plan_command import plan as command
from djinn_core.wire.messages import DeviceInfo, ExecutorStatus, Status

MIB = 1 << 20
CONFIGURATION = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 512,
    "dtype": "float32",
}
WEIGHTS = 4 * (2 * (2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 256 + 2 * 128) + 2 * 512 * 128 + 128)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIGURATION))
    return str(tmp_path / "model")


@pytest.fixture
def fit_model(folder, monkeypatch):
    """Return the output of `djinn fit` against a simulated server whose devices have `free` bytes each."""

    def fit_model(free, *options, devices=1, spill=0, as_json=True):
        described = [
            ExecutorStatus(DeviceInfo(f"cpu:{n}", "cpu", memory=64 * MIB, memory_free=free, spill=spill), 1, "ready")
            for n in range(devices)
        ]
        status = Status("26.11.0", 1, 1.0, tuple(described))
        monkeypatch.setattr(fit, "ask_named", lambda *_: {"tcp://one:5556": status})
        arguments = [folder, "--tokens", "64", *options, *(["--json"] if as_json else [])]
        answer = CliRunner().invoke(command, arguments, catch_exceptions=False)
        return answer.exit_code, json.loads(answer.stdout) if as_json else answer.stdout

    return fit_model


def test_live_server_reports_free_memory(folder, serving, monkeypatch):
    monkeypatch.setenv("DJINN_TOKEN", serving.token)
    url = next(url for url in serving.urls if url.startswith("tcp://"))
    servers = ["--server", url, "--server", "tcp://127.0.0.1:9"]
    answer = CliRunner().invoke(command, [folder, *servers, "--step", "decode", "--batch", "2"])
    assert answer.exit_code == 0, answer.output
    assert "ignores tcp://127.0.0.1:9, which did not answer: no server answers" in answer.stderr
    assert f"executor   {url}" in answer.stdout
    assert "The model fits." in answer.stdout


def test_decode_step_memory_is_listed_by_kind(fit_model):
    code, found = fit_model(32 * MIB, "--step", "decode", "--batch", "2", "--new-tokens", "64")
    assert (code, found["fits"]) == (0, True)
    assert found["cache_bytes_per_token"] == pytest.approx(2 * 2 * 64 * 4, rel=0.01)
    assert found["memory"]["weights"] == pytest.approx(WEIGHTS, rel=0.01)
    assert found["cache_bytes"] == pytest.approx(2 * 128 * 2 * 2 * 64 * 4, rel=0.01)  # inputs, tokens, layers, K and V
    assert sum(found["memory"].values()) == found["needed"]
    assert [one["name"] for one in found["programs"]] == ["prompt", "decode"]
    assert found["rate"] > 0
    assert found["rate_unit"] == "tokens"


def test_training_step_memory_is_listed_by_kind(fit_model):
    adam = fit_model(32 * MIB, "--step", "train")[1]
    plain = fit_model(32 * MIB, "--step", "train", "--optimizer", "SGD")[1]
    (most,) = [one["most"] for one in adam["programs"]]
    assert most["optimizer"] == pytest.approx(2 * WEIGHTS, rel=0.01)
    assert most["gradients"] == pytest.approx(WEIGHTS, rel=0.05)
    assert adam["needed"] > plain["needed"] + 1.9 * WEIGHTS


def test_suggestions_to_fit_are_planned(fit_model):
    needed = fit_model(32 * MIB, "--batch", "8")[1]["needed"]
    code, found = fit_model(needed - 300_000, "--batch", "8")
    assert (code, found["fits"]) == (1, False)
    changes = {one["change"].rpartition(" ")[0]: one for one in found["suggestions"] if one["fits"]}
    assert {"--batch", "--tokens", "--dtype"} <= changes.keys()
    smaller = changes["--batch"]["change"].split()[1]
    code, found = fit_model(needed - 300_000, "--batch", smaller)
    assert (code, found["needed"]) == (0, changes["--batch"]["needed"])
    assert fit_model(needed - 300_000, "--batch", str(int(smaller) + 1))[0] == 1
    assert fit_model(needed - 300_000, "--batch", "8", "--dtype", "bfloat16")[0] == 0


def test_model_too_large_for_one_executor_fits_several(fit_model):
    needed = fit_model(32 * MIB)[1]["needed"]
    _, alone = fit_model(int(needed * 0.8))
    assert [one["fits"] for one in alone["suggestions"] if "executors" in one["change"]] == [True]
    code, divided = fit_model(int(needed * 0.8), devices=2)
    assert (code, [one["fits"] for one in divided["executors"]]) == (0, [False, False])
    assert len(divided["together"]) == 2
    assert max(divided["together"].values()) <= needed * 0.8


def test_text_shows_missing_bytes(fit_model):
    code, text = fit_model(MIB, "--step", "train", as_json=False)
    assert code == 1
    assert "short" in text
    assert "The model does not fit. Planned changes:" in text
    assert "--optimizer sgd" in text


def test_spillable_memory_is_shown(fit_model):
    needed = fit_model(32 * MIB)[1]["needed"]
    _, found = fit_model(int(needed * 0.9), spill=64 * MIB)
    assert [one["fits"] for one in found["suggestions"] if one["change"] == "none: the executor spills"] == [True]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--step", "train", "--optimizer", "none"],
            "--optimizer none: torch.optim has no such class. Choose one of .*adamw",
        ),
        (["--dtype", "int8"], "--dtype int8: PyTorch has no floating-point dtype"),
        (["--step", "train", "--optimizer", "LBFGS"], "its step calls the model a variable number of times"),
    ],
)
def test_fit_refuses_unknown_names(fit_model, options, message):
    with pytest.raises(ConfigurationError, match=message):
        fit_model(MIB, *options)


@pytest.mark.parametrize("target", ["./nowhere", "/nowhere/model", "meta-llama/Llama-3-8B", "gpt2_nowhere"])
def test_missing_model_names_accepted_forms(target):
    with pytest.raises(ConfigurationError, match=f"there is no model '{target}': name the config.json"):
        built_model(target, Step())


# --- against what an executor holds (`python -m evaluation fit` has more models, on a server) ------------------------------------


@pytest.fixture
def predict_and_measure(monkeypatch):
    """Return a function that runs a benchmark case in an executor. It returns predicted and measured bytes."""
    from configured import configure_anew

    from evaluation.benchmarks import bench_fit, counted_cpu

    plugins = [*(name for name in _plugin_names() if name != "counted_cpu"), counted_cpu]

    def predict_and_measure(case, folder):
        configure_anew(executor="inline", device="counted", threads=1, plugins=plugins)
        djinn.init()
        torch.manual_seed(0)
        model, config = case.build()
        config.save_pretrained(folder)
        step = Step(case.step, case.batch, case.tokens, case.new, case.optimizer)
        executor = fit.Executor("here", DeviceCapabilities("0/cpu:0", "cpu"))
        asked = fit.Fit(built_model(str(folder), step), step, (executor,), open_plugins())
        predicted = asked.described()["needed"]
        model.to("remote_accelerator:0")  # an executor in this process would count the memory of this process, too
        djinn.synchronize()
        bench_fit.run(model, case)
        return predicted, torch.remote_accelerator.max_memory_allocated()

    yield bench_fit, predict_and_measure
    configure_anew()


def _plugin_names():
    from djinn_core.registry.discovery import installed

    return sorted({plugin.name for plugin in installed()})


@pytest.mark.usefixtures("plans_all")  # on a busy machine, plans become ready only after further runs
@pytest.mark.parametrize(
    "name", long_or(["gpt2, SGD"], ["gpt2, SGD", "resnet"])
)  # `python -m evaluation fit` has further models
def test_predicted_memory_is_within_ten_percent(predict_and_measure, tmp_path, name):
    benchmark, measure = predict_and_measure
    case = attrs.evolve(benchmark.CASES[name], batch=2, new=4)
    predicted, held = measure(case, tmp_path)
    assert held <= predicted <= benchmark.BAR * held
