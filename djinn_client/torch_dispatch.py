"""Private functions of PyTorch that clients call: dispatcher, autograd engine, modules, C++ backends, tensor objects.

`torch_private.missing` lists the functions that the installed PyTorch lacks.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import ModuleType
from typing import Any, Final, TypeAlias, TypeVar

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
from torch.utils import backend_registration

F = TypeVar("F", bound=Callable[..., Any])


def pass_for(function: Callable[..., Any], original: Callable[..., Any]) -> None:
    """Make PyTorch treat `function`, which calls the factory `original`, as that factory.

    `torch.jit.script` then finds the built-in. Default devices look at the innermost call, which is `original`.
    """
    torch.utils._device._device_constructors()  # caches the functions of `torch` as they are now
    builtin = torch.jit._builtins._find_builtin(original)
    if builtin is not None:
        torch.jit._builtins._register_builtin(function, builtin)


def make_wrapper(
    cls: type[torch.Tensor],
    shape: Sequence[int],
    stride: Sequence[int],
    offset: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Any:
    """Return a tensor without memory that has this metadata (sizes in elements)."""
    return torch.Tensor._make_wrapper_subclass(cls, shape, stride, offset, None, dtype, torch.strided, device)


def never_compiled(function: F) -> F:
    """Decorator: `torch.compile` never compiles the function or its callees.

    Otherwise it would replace the recording of ops by the ops of the first recording.
    """
    frames: Any = torch._C._dynamo.eval_frame
    strategy = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
    frames.set_code_exec_strategy(function.__code__, strategy)
    return function


def not_compiled_itself(function: F) -> F:
    """Decorator: `torch.compile` runs the function uncompiled, but compiles its callees."""
    frames: Any = torch._C._dynamo.eval_frame
    strategy = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.DEFAULT)
    frames.set_code_exec_strategy(function.__code__, strategy)
    return function


def collectives(names: Sequence[str]) -> list[Any]:
    """Return the overloads of these ops of `torch.distributed` that this PyTorch has."""
    spaces = (torch.ops.c10d, torch.ops._c10d_functional) if torch.distributed.is_available() else ()
    functions = [getattr(space, name, None) for space in spaces for name in names]
    return [packet.default for packet in functions if packet is not None]


def higher_order_ops() -> Mapping[str, Any]:
    """Return the registered higher-order ops by name."""
    return torch._ops._higher_order_ops


def composite_implementation(op: Any) -> Callable[..., Any] | None:
    """Return a higher-order op's implementation by other ops, for tensors of any kind, or None if it has none."""
    return op.py_kernels.get(torch._C.DispatchKey.CompositeExplicitAutograd)  # type: ignore[no-any-return]


def differentiated(op: Any) -> Callable[..., Any] | None:
    """Return a higher-order op's implementation under autograd, or None if it has none."""
    return op.py_kernels.get(torch._C.DispatchKey.Autograd)  # type: ignore[no-any-return]


def implement_under_autograd(op: Any, implementation: Callable[..., Any]) -> None:
    """Make a higher-order op call `implementation` when autograd handles tensors of the device."""
    op.py_impl(torch._C.DispatchKey.AutogradPrivateUse1)(implementation)


# Returns the number of entered modes, which must see the same ops as a backend.
dispatch_modes: Final = torch._C._len_torch_dispatch_stack


def without_modes(function: F) -> F:
    """Decorator: active modes, such as tracers, do not see the function's ops."""

    @functools.wraps(function)
    def unseen(*args: Any, **kwargs: Any) -> Any:
        if not dispatch_modes():
            return function(*args, **kwargs)
        with torch.utils._python_dispatch._disable_current_modes():
            return function(*args, **kwargs)

    return unseen  # type: ignore[return-value]


def notes_views_and_writes() -> AbstractContextManager[object]:
    """Return a context for `__torch_dispatch__` in which PyTorch marks views and increments versions."""
    key = torch._C.DispatchKey.ADInplaceOrView
    guard: AbstractContextManager[object] = torch._C._SetExcludeDispatchKeyGuard(key, False)
    return guard


@contextmanager
def modes_as_before() -> Iterator[None]:
    """Context manager that restores the modes if an interrupt leaves the block, perhaps during the entry or exit of a mode."""
    grad = torch.is_grad_enabled()
    dispatching, calling = dispatch_modes(), torch._C._len_torch_function_stack()
    try:
        yield
    except KeyboardInterrupt:
        while dispatch_modes() > dispatching:
            torch._C._pop_torch_dispatch_stack()
        while torch._C._len_torch_function_stack() > calling:
            torch._C._pop_torch_function_stack()
        torch._C._set_grad_enabled(grad)
        raise


next_sequence_number: Callable[[], int] = torch._C._autograd._get_sequence_nr


def node_sequence_number() -> int:
    """Return the sequence number of this thread's current autograd node, as `next_sequence_number` counts.

    Nodes that accumulate gradients have no number. For these nodes, and without a current node, return a number above
    all other numbers.
    """
    node: Any = torch._C._current_autograd_node()
    return node._sequence_nr() if node is not None else 2**64 - 1


def makes_view(func: Any) -> bool:
    """Return True if a result of an overload shares an argument's memory without being that argument."""
    return any(result.alias_info is not None and not result.alias_info.is_write for result in func._schema.returns)


def class_of_script_object(instance: torch.ScriptObject) -> str:
    """Return the C++ class name of a TorchScript object, for example of packed weights."""
    name: str = instance._type().name()  # type: ignore[attr-defined]
    return name


def writes_out(func: Any) -> bool:
    """Return True if an overload has `out=` arguments."""
    return any(argument.is_out for argument in func._schema.arguments)


def suggested_format(tensor: torch.Tensor) -> torch.memory_format:
    """Return the memory format that kernels infer from a tensor's stride order. The tensor need not be dense."""
    suggest: Callable[[torch.Tensor], torch.memory_format] = importlib.import_module(
        "torch._prims_common"
    ).suggest_memory_format
    return suggest(tensor)


@functools.cache
def composite_kernel(func: Any) -> Callable[..., Any] | None:
    """Return the composite kernel of `func`, or None if it has none."""
    keys = (torch._C.DispatchKey.CompositeImplicitAutograd, torch._C.DispatchKey.CompositeExplicitAutograd)
    for key in keys:
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key):
            return functools.partial(func._op_dk, key)
    return None


def has_kernel(func: Any, key: str) -> bool:
    """Return True if an op has a kernel for a dispatch key, such as `AutocastCPU`."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key))


_AUTOCAST: Final[Any] = torch._C._parse_dispatch_key("AutocastPrivateUse1")


def cast_by_autocast(func: Any, args: Any, kwargs: Any, device_type: str, dtype: torch.dtype, *, restores: bool) -> Any:
    """Call an op below autocast, with floating-point tensors of the device cast to `dtype`. float64 tensors are not cast.

    `restores`: True if results get the dtype of the first tensor.
    """

    def eligible(argument: Any) -> bool:
        is_tensor = isinstance(argument, torch.Tensor) and argument.device.type == device_type
        return is_tensor and argument.is_floating_point() and argument.dtype is not torch.float64

    tree = torch.utils._pytree
    leaves = tree.tree_leaves((args, kwargs))
    first_dtype = next((leaf.dtype for leaf in leaves if isinstance(leaf, torch.Tensor)), None)
    args, kwargs = tree.tree_map(lambda leaf: leaf.to(dtype) if eligible(leaf) else leaf, (args, kwargs))
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(_AUTOCAST)):
        result = func(*args, **kwargs)
    if not restores:
        return result
    return tree.tree_map(lambda leaf: leaf.to(first_dtype) if eligible(leaf) else leaf, result)


@functools.cache
def backend_kernel(func: Any) -> Callable[..., Any] | None:
    """Return the kernel that an op's library registers for every out-of-tree backend, or None if it registers none.

    The op is outside of `aten`.
    """
    key = torch._C.DispatchKey.PrivateUse1
    if func.namespace == "aten" or not torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key):
        return None
    return functools.partial(func._op_dk, key)


# `torch.autograd.graph.increment_version` without its slow check of the list. Inference tensors have no version.
increment_versions: Final = torch._C._increment_version


def kernels_raise_versions(func: Any) -> bool:
    """Return True if the CPU kernel of `func` calls ops that increment `_version` of the tensors that it writes.

    Autograd increments versions for ops that return the written tensors. Kernels of ops without results either call such ops, or
    write memory directly and leave versions unchanged.
    """
    if has_kernel(func, "ADInplaceOrView"):
        return False  # kernels of `torch.library.custom_op`, which increments versions
    return not func._schema.returns and has_kernel(func, "CompositeExplicitAutograd")


def in_forward_mode() -> bool:
    """Return True during forward-mode differentiation."""
    return torch.autograd.forward_ad._current_level >= 0


def format_elements(tensor: torch.Tensor, indent: int) -> str:
    """Return the elements of a CPU tensor as PyTorch prints them."""
    text: str = torch._tensor_str._tensor_str(tensor, indent)
    return text


disabled_torch_function = torch._C._disabled_torch_function_impl


no_torch_functions = torch._C.DisableTorchFunctionSubclass


EngineRun = Callable[..., Any]


def wrap_engine(wrap: Callable[[EngineRun], EngineRun]) -> None:
    """Wrap the function that runs backward passes, in both modules that refer to it."""
    wrapped = wrap(torch.autograd.graph._engine_run_backward)
    torch.autograd.graph._engine_run_backward = wrapped
    torch.autograd._engine_run_backward = wrapped  # type: ignore[attr-defined]


ModuleApply = Callable[..., torch.nn.Module]


def wrap_module_apply(wrap: Callable[[ModuleApply], ModuleApply]) -> None:
    """Wrap `torch.nn.Module._apply`, which `to`, `cpu`, `half` and similar methods use."""
    torch.nn.Module._apply = wrap(torch.nn.Module._apply)  # type: ignore[method-assign]


CGenerator: TypeAlias = torch._C.Generator


def replace_classes(**replacements: type) -> None:
    """Replace classes in PyTorch's namespace, by name."""
    for name, replacement in replacements.items():
        setattr(torch, name, replacement)


ModuleCallImpl = Callable[..., Any]


def is_usual_module_call(call: ModuleCallImpl) -> bool:
    """Return True if `call` is PyTorch's `Module.__call__`, which calls `_compiled_call_impl` or `_call_impl`."""
    return call is torch.nn.Module._wrapped_call_impl


def wrap_module_call(wrap: Callable[[ModuleCallImpl], ModuleCallImpl]) -> None:
    """Wrap `torch.nn.Module.__call__`."""
    torch.nn.Module.__call__ = wrap(torch.nn.Module.__call__)  # type: ignore[method-assign]


def returns_list(op: str) -> bool:
    """Return True if an op, such as `aten::split.Tensor`, returns one list of tensors. Return False for an unknown name."""
    name, _, overload = op.partition(".")
    try:
        schema = torch._C._get_schema(name, overload)
    except RuntimeError:
        return False
    return len(schema.returns) == 1 and str(schema.returns[0].type) == "List[Tensor]"


def without_torch_dispatch() -> AbstractContextManager[Any]:
    """Return a context in which `__torch_dispatch__` is not called."""
    return torch._C._DisableTorchDispatch()


def boxed_function(namespace: str, name: str) -> Callable[..., Any]:
    """Return the op `namespace::name` without PyTorch's frames around it."""
    return getattr(getattr(torch.ops, namespace), name).default._op  # type: ignore[no-any-return]


def overloads_of(namespace: Any) -> Iterator[tuple[str, str, Any]]:
    """Yield the ops of a namespace, such as `torch.ops.aten`: their names, overload names and overloads."""
    for name in dir(namespace):
        packet = getattr(namespace, name)
        if isinstance(packet, torch._ops.OpOverloadPacket):
            for overload in packet.overloads():
                yield name, "" if overload == "default" else overload, getattr(packet, overload)


def rename_backend(name: str) -> None:
    """Make `torch.device(name)` the device of an out-of-tree backend."""
    backend_registration.rename_privateuse1_backend(name)


def add_device_module(name: str, module: ModuleType) -> None:
    """Register `module` as `torch.<name>`, and add methods of that name to tensors, modules and storages."""
    backend_registration.generate_methods_for_privateuse1_backend(for_storage=True)
    torch._register_device_module(name, module)


def own_device_kind() -> int:
    """Return the number of the device type of out-of-tree backends."""
    kinds: Any = torch._C._autograd.DeviceType
    return int(kinds.PrivateUse1)


def has_python_key(tensor: torch.Tensor) -> bool:
    """Return True if a `__torch_dispatch__` handles the ops of a tensor."""
    return bool(torch._C._dispatch_keys(tensor).has(torch._C.DispatchKey.Python))


is_transformed: Final[Callable[[torch.Tensor], bool]] = torch._C._functorch.is_functorch_wrapped_tensor


def of_own_class(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor` as an instance of PyTorch's own class, because user subclasses may override properties."""
    if type(tensor) is torch.Tensor:
        return tensor
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(torch.Tensor)


def poison_gradient_node(tensor: torch.Tensor, refuse: Callable[[Any], Any]) -> None:
    """Make an already recorded graph call `refuse` when it would accumulate a gradient into `tensor`."""
    if tensor.is_leaf and tensor.requires_grad and tensor._use_count() > 1:  # type: ignore[attr-defined]
        torch.autograd.graph.get_gradient_edge(tensor).node.register_prehook(refuse)


def forward_hooks(module: torch.nn.Module) -> list[Callable[..., Any]]:
    """Return all hooks before and after the forward pass of `module`, including hooks for all modules."""
    every = torch.nn.modules.module
    global_hooks = (every._global_forward_hooks, every._global_forward_pre_hooks)
    return [
        hook for hooks in (*global_hooks, module._forward_hooks, module._forward_pre_hooks) for hook in hooks.values()
    ]


def writes_to(tensor: torch.Tensor) -> int:
    """Return the tensor's version counter, which counts PyTorch's writes. Return 0 if the tensor has none."""
    return 0 if tensor.is_inference() else tensor._version


def unseen_by_function_modes() -> AbstractContextManager[None]:
    """Return a context in which function modes do not see functions on tensors."""
    guard: AbstractContextManager[None] = torch._C.DisableTorchFunction()
    return guard


def wrap_element_printing(wrap: Callable[[Callable[..., str]], Callable[..., str]]) -> None:
    """Wrap the function that prints a tensor's elements. This function gets the tensor and the indent."""
    printing: Any = importlib.import_module("torch._tensor_str")
    printing._tensor_str = wrap(printing._tensor_str)


def end_printing() -> None:
    """Turn `torch.func` on again after the printing of a tensor has failed.

    PyTorch turns `torch.func` off with an object in the printing frame. The error's traceback keeps that frame alive, so
    `vmap` would fail on this thread.
    """
    code = torch._tensor_str._str.__code__
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is code:
            frame.f_locals["guard"].__exit__(None, None, None)
        frame = frame.f_back
