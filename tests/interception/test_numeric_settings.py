"""Settings by which PyTorch chooses kernels and precisions: executors compute under those of the program."""

from __future__ import annotations

import pytest
import torch
from configured import configured
from simulated_marks import own_executors

import djinn
from djinn_client.interception.device.numeric_settings import require_exact
from djinn_client.interception.runtime_interface import port
from djinn_core import torch_private
from djinn_core.wire.messages import decode, encode
from djinn_core.wire.numeric_messages import NumericSettings
from djinn_server.shared_device import ProcessNumericSettings


@pytest.fixture
def deterministic():
    """Yield the switch for deterministic algorithms. It is off at the end."""
    yield torch.use_deterministic_algorithms
    torch.use_deterministic_algorithms(False)


def test_op_runs_under_settings_at_recording(embedded, deterministic):
    torch.ones(1, device=embedded).item()  # what is recorded before a session begins runs under the settings of then
    values = torch.ones(1000, device=embedded)  # memory that was written before is not nan
    del values
    before = torch.empty(1000, device=embedded)
    deterministic(True)
    filled, integers = torch.empty(1000, device=embedded), torch.empty(5, dtype=torch.int32, device=embedded)
    deterministic(False)
    after = torch.zeros(1000, device=embedded)
    del after
    after = torch.empty(1000, device=embedded)
    assert filled.isnan().all()
    assert integers.tolist() == [torch.iinfo(torch.int32).max] * 5
    assert not before.isnan().all()
    assert not after.isnan().all()


def test_nondeterministic_op_raises_under_deterministic_mode(embedded, deterministic):
    x = torch.arange(16.0).reshape(1, 1, 4, 4)
    pooled, indices = torch.nn.functional.max_pool2d(x, 2, return_indices=True)
    there = [t.to(embedded) for t in (pooled, indices)]
    deterministic(True)
    with pytest.raises(RuntimeError, match="does not have a deterministic implementation"):
        torch.nn.functional.max_unpool2d(*there, 2).cpu()
    expected = torch.zeros(16).scatter(0, indices.flatten(), pooled.flatten()).reshape(1, 1, 4, 4)
    deterministic(True, warn_only=True)
    with pytest.warns(UserWarning, match="does not have a deterministic implementation"):
        assert torch.equal(torch.nn.functional.max_unpool2d(*there, 2).cpu(), expected)


@own_executors
def test_settings_reach_every_executor_of_pool(deterministic):
    with configured(threads=1, executors=2, placement_policy="round_robin"):
        torch.ones(2, device="remote_accelerator:0").sum().item()
        deterministic(True)
        for index in (0, 1, 2):
            assert torch.empty(8, device=f"remote_accelerator:{index}").isnan().all()


def test_capture_sends_no_settings(deterministic):
    djinn.shut_down()
    with djinn.capture() as captured:
        x = torch.ones(3)
        deterministic(True)
        y = x + 1
    assert not djinn.compat.is_initialized()
    assert len(captured.graph.nodes) == 2
    del y


@pytest.mark.parametrize(
    "is_open", [pytest.param(False, marks=own_executors), True]
)  # with a server, the first op begins a session
def test_export_restores_settings(embedded, is_open):
    if is_open:
        torch.ones(2, device=embedded).sum().item()
    else:
        djinn.shut_down()
    with djinn.capture():  # what is recorded waits for a session to begin
        layer = torch.nn.Linear(4, 4).to(embedded)
        kept = layer(torch.ones(2, 4, device=embedded))
    more = kept + 1
    exported = torch.export.export(torch.nn.Linear(3, 2).eval(), (torch.ones(1, 3),))
    assert len(exported.graph.nodes) > 3
    assert djinn.compat.is_initialized() is is_open
    torch.testing.assert_close((more - kept).cpu(), torch.ones(2, 4))


def settings_at_op():
    """Return the numeric settings that a new op records."""
    torch.ones(1, device="remote_accelerator:0")
    return port.numeric_settings


def changed_settings():
    return NumericSettings(
        deterministic=True,
        warn_only=True,
        fill_uninitialized=False,
        float32=("none", "none", "ieee", "ieee", "tf32", "none", "ieee", "none", "none"),
        cudnn_enabled=False,
        cudnn_benchmark=True,
        cudnn_deterministic=True,
        mkldnn_enabled=False,
        mkldnn_deterministic=True,
        fp16_accumulation=True,
        fp16_reduction=(False, False),
        bf16_reduction=(False, True),
    )


def test_executor_applies_settings_of_running_session():
    before = torch_private.numeric_settings()
    process = ProcessNumericSettings()
    try:
        process.compute_under(changed_settings())
        assert NumericSettings(**torch_private.numeric_settings()) == changed_settings() == settings_at_op()
        process.compute_under(None)  # a session that has sent none
        assert torch_private.numeric_settings() == before
        check_former_switches()
    finally:
        torch_private.set_numeric_settings(before)


def check_former_switches():
    """Assert that PyTorch's old precision switches agree with the new settings. PyTorch raises if they do not."""
    with torch.backends.cudnn.flags(enabled=False):
        pass
    assert torch.get_float32_matmul_precision() == "highest"
    assert not torch.backends.cuda.matmul.allow_tf32


def test_message_defaults_equal_pytorch_defaults(python, plain_environment):
    assert decode(encode(changed_settings())) == changed_settings()
    script = "from djinn_core import torch_private; print(torch_private.numeric_settings())"
    fresh = python.run("-c", script, env=plain_environment, capture_output=True, text=True, check=True)
    assert fresh.stdout.strip() == str(
        {name: getattr(NumericSettings(), name) for name in torch_private.numeric_settings()}
    )


@pytest.mark.parametrize(
    "set_it",
    [
        lambda: torch.set_float32_matmul_precision("high"),
        lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", True),
        lambda: setattr(torch.backends.cudnn, "allow_tf32", False),
        lambda: setattr(torch.backends.cudnn, "benchmark", True),
        lambda: setattr(torch.backends.cudnn, "deterministic", True),
        lambda: setattr(torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", False),
        lambda: setattr(torch.utils.deterministic, "fill_uninitialized_memory", False),
    ],
    ids=["precision", "tf32", "cudnn tf32", "benchmark", "deterministic", "bf16", "fill"],
)
def test_every_setter_changes_recorded_settings(set_it):
    before = torch_private.numeric_settings()
    usual = settings_at_op()
    try:
        # PyTorch's own test utilities, where another test has imported them, forbid it outside of blocks.
        with getattr(torch.backends, "__allow_nonbracketed_mutation")():
            set_it()
        assert settings_at_op() != usual
        assert NumericSettings(**torch_private.numeric_settings()) == port.numeric_settings
    finally:
        torch_private.set_numeric_settings(before)
    assert settings_at_op() == usual
    check_former_switches()


def test_client_announces_inexact_results():
    before = port.numeric_settings
    try:
        require_exact(False)
        assert not port.numeric_settings.exact
        require_exact(True)
        assert port.numeric_settings == before
    finally:
        port.numeric_settings = before
