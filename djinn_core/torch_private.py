"""Private torch functions that both clients and servers use.

`missing()` returns the functions that the installed torch lacks; `djinn doctor` and a test report them.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final, TypeVar

import torch
import torch.autograd
import torch.autograd.forward_ad
import torch.autograd.graph
import torch.backends.cudnn
import torch.backends.mkldnn
import torch.multiprocessing.reductions
import torch.nn
import torch.utils._device
import torch.utils._foreach_utils
import torch.utils._python_dispatch
import torch.utils.dlpack
from torch._library import custom_ops

F = TypeVar("F", bound=Callable[..., Any])

# Backends and ops with a configurable precision. General settings come first, because they change those of their ops.
_PRECISIONS: Final = (
    ("generic", "all"),
    *(("cuda", op) for op in ("all", "matmul", "conv", "rnn")),
    *(("mkldnn", op) for op in ("all", "matmul", "conv", "rnn")),
)
# Switches by the names of PyTorch's setters and getters.
_SWITCHES: Final = {
    "fill_uninitialized": "deterministic_fill_uninitialized_memory",
    "cudnn_enabled": "cudnn_enabled",
    "cudnn_benchmark": "cudnn_benchmark",
    "cudnn_deterministic": "cudnn_deterministic",
    "mkldnn_enabled": "mkldnn_enabled",
    "mkldnn_deterministic": "mkldnn_deterministic",
    "fp16_accumulation": "cublas_allow_fp16_accumulation",
    "fp16_reduction": "cublas_allow_fp16_reduced_precision_reduction",
    "bf16_reduction": "cublas_allow_bf16_reduced_precision_reduction",
}
_NUMERIC_SETTERS: Final = (
    "_set_deterministic_algorithms",
    "_set_float32_matmul_precision",
    "_set_fp32_precision_setter",
    "_set_cudnn_allow_tf32",
    *(f"_set_{name}" for name in _SWITCHES.values()),
)
NEEDED: Final = (
    "torch._C.DispatchKey",
    "torch._C.DispatchKeySet",
    "torch._C.DisableTorchFunction",
    "torch._C.DisableTorchFunctionSubclass",
    "torch._C._disabled_torch_function_impl",
    "torch._C._dispatch_has_kernel_for_dispatch_key",
    "torch._tensor_str._str",
    "torch._tensor_str._tensor_str",
    "torch._C._autograd.DeviceType.PrivateUse1",
    "torch._C._autograd._get_sequence_nr",
    "torch._C._current_autograd_node",
    "torch._C._dynamo.eval_frame.set_code_exec_strategy",
    "torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors",
    "torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs",
    "torch._C._dynamo.guards._torchinductor_pyobject_tensor_data_ptr",
    "torch._C._ExcludeDispatchKeyGuard",
    "torch._C._dispatch_get_all_op_names",
    "torch._library.custom_ops.CustomOpDef",
    "torch._library.custom_ops.OPDEFS",
    "torch._C._get_schema",
    "torch._C._set_conj",
    "torch._C._should_allow_numbers_as_tensors",
    "torch._C._set_neg",
    "torch._make_per_channel_quantized_tensor",
    "torch._make_per_tensor_quantized_tensor",
    "torch._nested_compute_contiguous_strides_offsets",
    "torch._nested_view_from_buffer",
    "torch._C._get_nested_int",
    "torch._prims_common.suggest_memory_format",
    "torch.Tensor._use_count",
    "torch._C._storage_Use_Count",
    "torch.Tensor._make_wrapper_subclass",
    "torch._utils._rebuild_device_tensor_from_cpu_tensor",
    "torch._utils._rebuild_sparse_tensor",
    "torch._C._InferenceMode",
    "torch._C._increment_version",
    "torch._C._SetExcludeDispatchKeyGuard",
    "torch._compile._disable_dynamo",
    "torch._C._len_torch_dispatch_stack",
    "torch._C._distributed_c10d._create_work_from_future",
    "torch._ops.HigherOrderOperator.py_impl",
    "torch._ops._higher_order_ops",
    "torch.utils._python_dispatch.TorchDispatchMode",
    "torch.utils._python_dispatch._disable_current_modes",
    "torch.testing._comparison.default_tolerances",
    "torch.autograd._engine_run_backward",
    "torch.autograd.forward_ad._current_level",
    "torch.autograd.graph._engine_run_backward",
    "torch.jit._builtins._find_builtin",
    "torch.jit._builtins._register_builtin",
    "torch.nn.Module._apply",
    "torch.nn.modules.module._global_forward_hooks",
    "torch.nn.modules.module._global_forward_pre_hooks",
    "torch.utils._device._device_constructors",
    *(f"torch._C.{setter}" for setter in _NUMERIC_SETTERS),
)


def missing() -> list[str]:
    """Return the names in `NEEDED` that the installed torch lacks."""
    return [name for name in NEEDED if not _exists(name)]


def _exists(name: str) -> bool:
    head, *rest = name.split(".")
    module: Any = importlib.import_module(head)
    for part in rest:
        if not hasattr(module, part):
            return False
        module = getattr(module, part)
    return True


@functools.cache
def _libc10() -> ctypes.CDLL:
    """Load PyTorch's core library.

    Raises:
        OSError: the library is not in `torch/lib`.
    """
    folder = Path(torch.__file__).parent / "lib"
    libraries = sorted(folder.glob("libc10.*"))  # .so, or .dylib on macOS
    if not libraries:
        raise OSError(f"there is no library libc10 of PyTorch in {folder}: install torch again")
    return ctypes.CDLL(str(libraries[0]))


@functools.cache
def zero_fill_switch() -> Any:
    """Return the flag that makes PyTorch's CPU allocator zero-fill each allocation. Its `value` is a bool.

    Raises:
        OSError, ValueError: this build of PyTorch exports no such flag.
    """
    name = "FLAGS_caffe2_cpu_allocator_do_zero_fill"
    try:
        return ctypes.c_bool.in_dll(_libc10(), name)
    except ValueError:  # the symbol exists only with gflags
        return ctypes.c_bool.in_dll(_libc10(), f"_ZN3fLB{len(name)}{name}E")


def default_tolerances(dtype: torch.dtype) -> tuple[float, float]:
    """Return the `rtol` and `atol` of `torch.testing.assert_close` for `dtype`."""
    return torch.testing._comparison.default_tolerances(dtype)


# Equivalent to `torch.inference_mode`, which takes nine Python calls per block.
inference_mode: Final[Callable[[bool], AbstractContextManager[object]]] = torch._C._InferenceMode


def set_bits(tensor: torch.Tensor, conj: bool, neg: bool) -> None:
    """Set the lazy conjugation and negation bits of a tensor."""
    torch._C._set_conj(tensor, conj)
    torch._C._set_neg(tensor, neg)


def dispatched_operators() -> list[str]:
    """Return the names of all overloads that the dispatcher knows, such as `aten::add.Tensor`."""
    return torch._C._dispatch_get_all_op_names()


def schema_named(packet: str, overload: str) -> Any:
    """Return the schema of an overload. An empty overload name stands for the default."""
    return torch._C._get_schema(packet, overload)


def overload_called(name: str) -> Any:
    """Return the overload with a name such as `torchvision::nms`; None if no library of this process registers it."""
    if name not in dispatched_operators():
        return None
    packet, _, overload = name.partition(".")
    namespace, _, op = packet.partition("::")
    return getattr(getattr(getattr(torch.ops, namespace), op), overload or "default")


def python_operator(func: Any) -> Any:
    """Return the `CustomOpDef` of an op made by `torch.library.custom_op` or `triton_op`; None for any other op."""
    return custom_ops.OPDEFS.get(func.name())


def defining_module(definition: Any) -> str:
    """Return the name of the module that defines the user's function of a `CustomOpDef`."""
    function = definition._init_fn
    if function.__module__ == "torch._library.triton":  # `triton_op` wraps the function in a closure
        function = inspect.getclosurevars(function).nonlocals.get("fn", function)
    return str(function.__module__)


def python_operators(module: str) -> Iterator[Any]:
    """Yield overloads of ops that a module or its submodules define by `torch.library.custom_op` or `triton_op`."""
    for definition in [*custom_ops.OPDEFS.values()]:
        defined_in = defining_module(definition)
        if defined_in == module or defined_in.startswith(f"{module}."):
            yield definition._opoverload


def schema_of(func: Any) -> Any:
    """Return the schema of an `OpOverload`: its arguments and returns, with types and alias information."""
    return func._schema


def kernel_of(func: Any) -> Callable[..., Any]:
    """Return `plain_kernel_of(func)`; for `aten::_lazy_clone`, a function that also clones the memory of messages."""
    return _lazy_clone if func is torch.ops.aten._lazy_clone.default else plain_kernel_of(func)


def plain_kernel_of(func: Any) -> Callable[..., Any]:
    """Return the callable that an `OpOverload` calls. Calling it directly saves a Python frame."""
    kernel: Callable[..., Any] = func._op
    return kernel


def takes_numbers_for_tensors(packet: str) -> bool:
    """Return True if PyTorch converts Python numbers to tensors for the op `packet`, a name without overload."""
    return torch._C._should_allow_numbers_as_tensors(packet)


def _lazy_clone(tensor: torch.Tensor) -> torch.Tensor:
    """Return a lazy clone of a tensor. Memory that PyTorch did not allocate, such as a message's, is copied at once."""
    try:
        return torch.ops.aten._lazy_clone(tensor)  # type: ignore[no-any-return]
    except RuntimeError:
        memory = tensor.untyped_storage().clone()
        copy = tensor.new_empty(0).set_(memory, tensor.storage_offset(), tensor.shape, tensor.stride())
        set_bits(copy, tensor.is_conj(), tensor.is_neg())
        return torch.ops.aten._lazy_clone(copy)  # type: ignore[no-any-return]


def can_pack(weight: torch.Tensor) -> bool:
    """Return True if `packed_weight` supports this weight: oneDNN on a CPU, under the current numeric settings."""
    plain = weight.device.type == "cpu" and weight.dtype is torch.float32 and weight.dim() == 2
    return plain and torch.backends.mkldnn.is_available() and bool(torch._C._get_mkldnn_enabled())


def packed_weight(weight: torch.Tensor, rows: int) -> torch.Tensor:
    """Return a copy of a weight in oneDNN's fastest layout for products with `rows` rows.

    The weight has one row per column of the result.
    """
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), rows)
    return packed


def packed_product(rows: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return the product of rows and a packed weight, plus a bias."""
    result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, packed, bias, "none", [], "")
    return result


def number_of_storage(storage: torch.UntypedStorage) -> int:
    """Return the number that `storage_key` returns for tensors of this storage."""
    number: int = storage._cdata
    return number


def storage_key(tensor: torch.Tensor) -> int:
    """Return a number that is equal for two tensors exactly if they share a storage, also on the meta device."""
    key: int = tensor.untyped_storage()._cdata
    return key


def storage_use_count(storage: torch.UntypedStorage) -> int:
    """Return how many tensors and storages of Python refer to the memory of `storage`."""
    count: int = torch._C._storage_Use_Count(storage._cdata)
    return count


@functools.cache
def is_composite(func: Any) -> bool:
    """Return True if PyTorch decomposes `func` before a backend sees it, unless the backend requests it whole."""
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key)


def numeric_settings() -> dict[str, Any]:
    """Return this process's settings that select kernels and precisions, with the fields of `NumericSettings`."""
    core: Any = torch._C
    return {
        "deterministic": core._get_deterministic_algorithms(),
        "warn_only": core._get_deterministic_algorithms_warn_only(),
        "float32": tuple([core._get_fp32_precision_getter(backend, op) for backend, op in _PRECISIONS]),
        **{field: getattr(core, f"_get_{name}")() for field, name in _SWITCHES.items()},
    }


def set_numeric_settings(settings: Mapping[str, Any]) -> None:
    """Apply settings from `numeric_settings` to this process."""
    core: Any = torch._C
    core._set_deterministic_algorithms(settings["deterministic"], warn_only=settings["warn_only"])
    precisions = dict(zip(_PRECISIONS, settings["float32"], strict=True))
    # PyTorch keeps the former switches beside the precisions. Reading them raises if both disagree.
    core._set_cudnn_allow_tf32(precisions["cuda", "conv"] == precisions["cuda", "rnn"] == "tf32")
    product = "high" if precisions["cuda", "matmul"] == "tf32" else "highest"
    core._set_float32_matmul_precision("medium" if precisions["mkldnn", "matmul"] == "bf16" else product)
    for (backend, op), precision in precisions.items():
        if core._get_fp32_precision_getter(backend, op) != precision:
            core._set_fp32_precision_setter(backend, op, precision)
    for field, name in _SWITCHES.items():
        value = settings[field]
        getattr(core, f"_set_{name}")(*(value if isinstance(value, tuple) else (value,)))
