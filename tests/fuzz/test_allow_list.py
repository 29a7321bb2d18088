"""Every overload that PyTorch has is allowed or refused with a reason, and what is allowed can do no more than compute."""

from __future__ import annotations

import re

import pytest
import torch

from djinn_core import torch_private
from djinn_core.errors import UnsupportedOperation
from djinn_core.ir.operators import (
    EXCHANGE_RANDOM_STATE,
    GENERATOR_STATE,
    LAYOUT_CALL,
    OWN_OPERATORS,
    RESTORED_GENERATOR,
    SET_RANDOM_STATE,
    allowed_operators,
    refusal,
    resolve,
    split_name,
)
from djinn_server.builtins.cpu import CpuRuntime
from djinn_server.checks.rules import RULES
from djinn_server.running.device_time import DeviceTimer
from djinn_server.running.own_operators import own_operators
from djinn_server.running.random_state import DeviceRandomness

# Said once more, on purpose, and not taken from the list under test.
PLAIN = {"Tensor", "int", "bool", "float", "number", "complex", "str", "Device", "Generator", "NoneType"}
# What op-level fuzzing and PyTorch's own issues have as reading or writing beyond memory, or as never ending.
KNOWN_TO_TRUST = """
    _adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward _batch_norm_impl_index_backward _batch_norm_with_update
    _batch_norm_with_update_functional _cdist_backward _cholesky_solve_helper _chunk_cat.out _compute_linear_combination
    _convert_indices_from_coo_to_csr _convert_indices_from_csr_to_coo _ctc_loss _cummax_helper _cummin_helper
    _dyn_quant_matmul_4bit _embedding_bag_backward _embedding_bag_dense_backward _embedding_bag_per_sample_weights_backward
    _fft_c2c _fft_c2r _fft_r2c _foreach_copy _fused_adagrad _fused_adam_ _fused_moving_avg_obs_fq_helper _fused_sgd
    _log_softmax_backward_data _logcumsumexp.out _native_batch_norm_legit _new_zeros_with_same_feature_meta
    _nnpack_spatial_convolution _pdist_backward _pdist_forward _reshape_alias _reshape_alias_copy _segment_reduce_backward
    _slow_conv2d_backward _sobol_engine_initialize_state_ _stack _thnn_differentiable_gru_cell_backward
    _thnn_differentiable_lstm_cell_backward _transform_bias_rescale_qkv _weight_norm _weight_norm_interface
    _weight_norm_interface_backward adaptive_max_pool2d_backward adaptive_max_pool3d_backward avg_pool3d_backward
    batch_norm_update_stats choose_qparams_optimized chunk embedding_backward embedding_dense_backward
    fractional_max_pool2d_backward fractional_max_pool3d_backward gelu_backward grid_sampler_2d_backward
    grid_sampler_3d_backward hsplit lcm linalg_matrix_power lstm lu_unpack max_pool2d_with_indices_backward
    max_pool3d_with_indices_backward native_batch_norm native_batch_norm_backward native_layer_norm_backward
    nll_loss2d_backward promote_types random_ reflection_pad1d_backward reflection_pad2d_backward
    replication_pad1d_backward replication_pad2d_backward segment_reduce smooth_l1_loss_backward
    special_laguerre_polynomial_l special_legendre_polynomial_p tensor_split unfold_backward
""".split()


def schema_of(name):
    packet, overload = split_name(name)
    return torch_private.schema_named(f"aten::{packet}", "" if overload == "default" else overload)


def atomic_types(kind):
    return set(re.sub(r"Optional|List|[\[\]]", " ", str(kind)).split())


def test_every_overload_is_allowed_or_has_refusal():
    known = torch_private.dispatched_operators()
    reasons = {name: refusal(name) for name in known}
    assert sum(name.startswith("aten::") for name in known) > 2000
    assert {name for name, reason in reasons.items() if not reason} == allowed_operators() - OWN_OPERATORS
    assert all(len(reason) > 20 for reason in reasons.values() if reason)


def test_only_aten_namespace_is_reached():
    assert {name.partition("::")[0] for name in allowed_operators()} == {"aten", "djinn"}
    assert {name for name in allowed_operators() if name.startswith("djinn::")} == OWN_OPERATORS
    runtime = CpuRuntime()
    assert set(own_operators(runtime, DeviceTimer(runtime), DeviceRandomness(runtime.device))) == OWN_OPERATORS


def test_allowed_ops_take_tensors_and_numbers():
    for name in allowed_operators() - OWN_OPERATORS:
        schema = schema_of(name)
        for argument in (*schema.arguments, *schema.returns):
            assert atomic_types(argument.type) <= PLAIN, f"{name} takes or returns {argument.type}"
        texts = {a.name for a in schema.arguments if "str" in atomic_types(a.type)}
        assert not {t for t in texts if re.search("file|path|module|url|code", t)}, f"{name} takes {texts}"


@pytest.mark.parametrize("name", KNOWN_TO_TRUST)
def test_unsafe_ops_are_refused_or_checked(name):
    overloads = [
        n for n in torch_private.dispatched_operators() if n.removeprefix("aten::") == name or split_name(n)[0] == name
    ]
    assert overloads
    for overload in overloads:
        assert refusal(overload) or split_name(overload)[0] in RULES


def test_no_op_creates_tensor_without_memory():
    with pytest.raises(RuntimeError, match="invalid python storage"):
        torch._efficientzerotensor((3,)).untyped_storage().data_ptr()
    assert refusal("aten::_efficientzerotensor")


def test_rules_name_existing_ops():
    packets = {split_name(name)[0] for name in allowed_operators()}
    assert set(RULES) - packets == set()


@pytest.mark.parametrize("kind", ["Storage", "Stream", "AnyEnumType", "Dict", "Any", "Future", "__torch__"])
def test_unsendable_argument_kinds_are_refused(kind):
    reached = [n for n in torch_private.dispatched_operators() if n.startswith("aten::") and kind in str(schema_of(n))]
    assert all(refusal(name) for name in reached)


def test_allowed_op_resolves_by_name():
    assert resolve("aten::relu") is torch.ops.aten.relu.default


@pytest.mark.parametrize("name", [SET_RANDOM_STATE, EXCHANGE_RANDOM_STATE, RESTORED_GENERATOR, GENERATOR_STATE])
def test_own_operators_name_expected_types(name):
    runtime = CpuRuntime()
    with pytest.raises(TypeError, match="not int"):
        own_operators(runtime, DeviceTimer(runtime), DeviceRandomness(runtime.device))[name](5)


def test_layout_call_without_plugin_names_package():
    runtime = CpuRuntime()
    call = own_operators(runtime, DeviceTimer(runtime), DeviceRandomness(runtime.device))[LAYOUT_CALL]
    with pytest.raises(UnsupportedOperation, match=r"sparse.*pip install ./plugins/layouts"):
        call("aten::mm", torch.ones(2, 2))
