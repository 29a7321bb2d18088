"""The allow-list of ops that a program may contain, equal on client and executor.

An overload is allowed if it is in PyTorch's `aten` namespace, forms can express all argument types of its schema, and
the list of exclusions does not have it. Received names are only looked up in this list. Custom ops are allowed
individually (`allow_custom`). An executor allows the ops that its operator chose. A client allows the ops that
executors offer and the program calls. A received name of a custom op is only a dictionary key.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from typing import Any

import torch

from djinn_core import torch_private
from djinn_core.errors import UnsupportedOperation
from djinn_core.ir.layout_operators import LAYOUT_OPERATORS
from djinn_core.system.printable import printable

MANUAL_SEED = "djinn::manual_seed"
GET_RANDOM_STATE = "djinn::get_random_state"
SET_RANDOM_STATE = "djinn::set_random_state"
EXCHANGE_RANDOM_STATE = "djinn::exchange_random_state"
SEEDED_GENERATOR = "djinn::seeded_generator"
RESTORED_GENERATOR = "djinn::restored_generator"
GENERATOR_STATE = "djinn::generator_state"
MARK = "djinn::mark"
HAS_PASSED = "djinn::has_passed"
ELAPSED_TIME = "djinn::elapsed_time"
LAYOUT_CALL = "djinn::layout_call"  # see `layout_operators`
OWN_OPERATORS = frozenset({
    MANUAL_SEED, GET_RANDOM_STATE, SET_RANDOM_STATE, EXCHANGE_RANDOM_STATE, SEEDED_GENERATOR, RESTORED_GENERATOR, GENERATOR_STATE, MARK,
    HAS_PASSED, ELAPSED_TIME, LAYOUT_CALL,
})  # fmt: skip
_BEYOND_TENSORS = (
    "it reaches files, foreign memory, other processes or autograd, or changes what a tensor is for PyTorch"
)
_UNCHECKED = "its kernel does not check its arguments before it builds tensors or reads memory, and no program needs it by this name"
# Op names without overload. `_backward` runs autograd, which executors never do. `_efficientzerotensor` claims bytes that it does not have.
_REACHING_BEYOND = (
    "_backward _efficientzerotensor "
    "_coalesced_ _cuda_getCurrentRawStream _has_compatible_shallow_copy_type _make_dual _make_dual_copy "
    "_nested_tensor_from_mask _pin_memory _print _propagate_xla_data _remove_batch_dim _use_cudnn_ctc_loss _version "
    "backward data from_file is_pinned output_nr pin_memory record_stream rename rename_ requires_grad_ retain_grad "
    "retains_grad save set_data "
)
_WITHOUT_CHECKS = (
    "_batch_norm_impl_index_backward _batch_norm_with_update_functional _compute_linear_combination "
    "_convert_indices_from_coo_to_csr _convert_indices_from_csr_to_coo _cummax_helper _cummin_helper "
    "_dyn_quant_matmul_4bit _dyn_quant_pack_4bit_weight _foreach_copy _fused_moving_avg_obs_fq_helper_functional "
    "_nnpack_spatial_convolution _slow_conv2d_backward _stack _thnn_differentiable_gru_cell_backward "
    "_thnn_differentiable_lstm_cell_backward choose_qparams_optimized promote_types "
)
_EXCLUDED = dict.fromkeys(_REACHING_BEYOND.split(), _BEYOND_TENSORS) | dict.fromkeys(
    _WITHOUT_CHECKS.split(), _UNCHECKED
)
# Reasons by overload: PyTorch's public functions use the other overloads.
_EXCLUDED_OVERLOADS = dict.fromkeys(("aten::_chunk_cat.out", "aten::_logcumsumexp.out"), _UNCHECKED)
# Ops on tensors that are not strided (sparse, quantized, nested, MKL-DNN), by substring, prefix or whole name. No
# regular expressions: a client checks few names, and compiling a pattern takes longer.
_OF_OTHER_LAYOUTS = ("sparse", "mkldnn", "nested", "coalesce", "cslt")
_BEGINNING_OTHER_LAYOUTS = (
    "_empty_affine_quantized", "_empty_per_channel_affine_quantized", "_make_per_channel_quantized", "_make_per_tensor_quantized",
    "_wrapped_quantized", "empty_quantized", "q_per_channel_", "quantize_per", "quantized_",
)  # fmt: skip
_PARTS = ("indices", "_indices", "values", "_values", "col_indices", "ccol_indices", "row_indices", "crow_indices")
_NAMED_OTHER_LAYOUTS = frozenset({
    *_PARTS, *(f"{part}_copy" for part in _PARTS), "_nnz", "dequantize", "int_repr", "q_scale", "q_zero_point", "qscheme",
})  # fmt: skip
_TYPES = frozenset(("Tensor", "int", "bool", "float", "number", "complex", "str", "Device", "Generator"))


def split_name(name: str) -> tuple[str, str]:
    """Return `("add", "Tensor")` for `aten::add.Tensor`; the overload of `aten::relu` is `default`."""
    packet, _, overload = name.removeprefix("aten::").partition(".")
    return packet, overload or "default"


_SHOWN = 100  # number of shown characters of a refused name
_custom: dict[str, torch._ops.OpOverload] = {}
NO_NAMESPACES = frozenset(
    {"aten", "djinn", "prim", "prims", ""}
)  # namespaces of built-in ops, which custom ops cannot have


def is_custom(func: torch._ops.OpOverload) -> bool:
    """Return True if an op is outside of `aten`."""
    return func.namespace != "aten"


def allow_custom(operators: Mapping[str, torch._ops.OpOverload]) -> None:
    """Let programs contain the custom ops of `operators`, a mapping from name to op."""
    _custom.update(operators)


def custom_refusal(func: torch._ops.OpOverload) -> str:
    """Return the reason why no program may contain a custom op; empty if programs may."""
    if func.namespace in NO_NAMESPACES:
        return "it is one of PyTorch's own ops, or Djinn's"
    return _unserializable_reason(torch_private.schema_of(func))


@functools.cache
def allowed_operators() -> frozenset[str]:
    """Return the names of all overloads of `aten` and of Djinn's own ops that a program may contain."""
    return OWN_OPERATORS | frozenset(name for name in torch_private.dispatched_operators() if not refusal(name))


@functools.cache
def is_allowed(name: str) -> bool:
    """Return True if a program may contain the overload `name`. Do not build the whole allow-list for this."""
    return name in OWN_OPERATORS or not refusal(name)


def refusal(name: str) -> str:
    """Return the reason why no program may contain the overload `name`; empty if programs may."""
    if not name.startswith("aten::"):
        return "it is not one of PyTorch's own operators"
    packet, overload = split_name(name)
    if _is_of_other_layouts(packet):
        return "it is for tensors that are not strided"
    if packet in _EXCLUDED or name in _EXCLUDED_OVERLOADS:
        return _EXCLUDED.get(packet) or _EXCLUDED_OVERLOADS[name]
    return _unserializable_reason(
        torch_private.schema_named(f"aten::{packet}", "" if overload == "default" else overload)
    )


def _unserializable_reason(schema: Any) -> str:
    types = [str(a.type) for a in (*schema.arguments, *schema.returns)]
    strange = [kind for kind in types if not _can_travel(kind)]
    return f"it takes or returns types that cannot be sent: {', '.join(strange)}" if strange else ""


@functools.cache
def _can_travel(kind: str) -> bool:
    bare = kind.removeprefix("Optional[").removeprefix("List[").removeprefix("Optional[")
    return bare.rstrip("]") in _TYPES


def _is_of_other_layouts(packet: str) -> bool:
    if packet in _NAMED_OTHER_LAYOUTS or packet.startswith(_BEGINNING_OTHER_LAYOUTS):
        return True
    return any(word in packet for word in _OF_OTHER_LAYOUTS)


@functools.cache
def needs_other_layout(name: str) -> bool:
    """Return True if an overload is for sparse, quantized, nested or MKL-DNN tensors, which no remote device has."""
    return _is_of_other_layouts(split_name(name)[0])


@functools.cache
def operators_digest() -> str:
    """Return the digest of the allow-list. Client and executor compare their digests."""
    return hashlib.blake2b(
        "\n".join(sorted({*allowed_operators(), *LAYOUT_OPERATORS})).encode(), digest_size=16
    ).hexdigest()


def resolve_for_layouts(name: str) -> torch._ops.OpOverload:
    """Return the overload called `name`, whose arguments may include sparse tensors.

    Raises:
        UnsupportedOperation: the name is not in `LAYOUT_OPERATORS`.
    """
    if name not in LAYOUT_OPERATORS:
        raise UnsupportedOperation(f"{name} is not an op that programs may contain with sparse tensors")
    packet, overload = split_name(name)
    overload_op: torch._ops.OpOverload = getattr(getattr(torch.ops.aten, packet), overload)
    return overload_op


def resolve(name: str) -> torch._ops.OpOverload:
    """Return the overload called `name`, such as `aten::add.Tensor`.

    Raises:
        UnsupportedOperation: the op is not on the allow-list.
    """
    return _custom.get(name) or _resolve_aten(name)


@functools.cache
def _resolve_aten(name: str) -> torch._ops.OpOverload:
    if name not in allowed_operators() or name in OWN_OPERATORS:
        if "::" in name and not name.startswith(("aten::", "djinn::")):
            raise UnsupportedOperation(
                f"{printable(name[:_SHOWN])} is not an op that this server allows: "
                "`djinn serve --operators` names the custom ops that clients may run"
            )
        raise UnsupportedOperation(
            f"{printable(name[:_SHOWN])} is not an op that programs may contain in torch {torch.__version__}; "
            "`djinn doctor` compares the versions of both sides"
        )
    packet, overload = split_name(name)
    overload_op: torch._ops.OpOverload = getattr(getattr(torch.ops.aten, packet), overload)
    return overload_op
