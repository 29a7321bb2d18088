"""Private functions of PyTorch that clients call: dispatcher, autograd engine, modules, backends in C++, tensors as objects.

`torch_private.missing` lists those that the installed PyTorch lacks.
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
    """Have PyTorch take `function`, which calls the factory `original`, for that.

    `torch.jit.script` finds the built-in by it, and default devices, which look at what is called at last, the original.
    """
    torch.utils._device._device_constructors()  # remembers the functions of `torch` as they are now
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
    """A tensor without memory that has this metadata (sizes in elements)."""
    return torch.Tensor._make_wrapper_subclass(cls, shape, stride, offset, None, dtype, torch.strided, device)


def never_compiled(function: F) -> F:
    """Decorator: `torch.compile` leaves the function and all that it calls alone, however it is reached.

    It would otherwise compile the recording of ops into what was recorded the first time.
    """
    frames: Any = torch._C._dynamo.eval_frame
    strategy = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
    frames.set_code_exec_strategy(function.__code__, strategy)
    return function


def not_compiled_itself(function: F) -> F:
    """Decorator: `torch.compile` runs the function as it is, and goes on with what it calls."""
    frames: Any = torch._C._dynamo.eval_frame
    strategy = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.DEFAULT)
    frames.set_code_exec_strategy(function.__code__, strategy)
    return function


def collectives(names: Sequence[str]) -> list[Any]:
    """The overloads of these ops of `torch.distributed`, as far as this PyTorch has them."""
    spaces = (torch.ops.c10d, torch.ops._c10d_functional) if torch.distributed.is_available() else ()
    found = [getattr(space, name, None) for space in spaces for name in names]
    return [packet.default for packet in found if packet is not None]


def higher_order_ops() -> Mapping[str, Any]:
    """The higher-order ops that PyTorch has registered, by name."""
    return torch._ops._higher_order_ops


def made_of_ops(op: Any) -> Callable[..., Any] | None:
    """The implementation of a higher-order op that calls other ops, for tensors of any kind; None if it has none."""
    return op.py_kernels.get(torch._C.DispatchKey.CompositeExplicitAutograd)  # type: ignore[no-any-return]


def differentiated(op: Any) -> Callable[..., Any] | None:
    """The implementation of a higher-order op under autograd; None if it has none."""
    return op.py_kernels.get(torch._C.DispatchKey.Autograd)  # type: ignore[no-any-return]


def implement_under_autograd(op: Any, implementation: Callable[..., Any]) -> None:
    """Have a higher-order op call `implementation` where autograd looks at tensors of the device."""
    op.py_impl(torch._C.DispatchKey.AutogradPrivateUse1)(implementation)


# Tells the number of modes that are entered, which are to see the ops that a backend sees.
dispatch_modes: Final = torch._C._len_torch_dispatch_stack


def without_modes(function: F) -> F:
    """Decorator: what the function computes is not seen by modes that are in force, such as those that trace."""

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
    """Restore the modes where an interrupt leaves the block, perhaps while a mode is entered or left."""
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
    """The number of the autograd node that this thread is running, as `next_sequence_number` said before it was made.

    Nodes that accumulate gradients have none, and give a number above all others; as does a thread that runs none.
    """
    node: Any = torch._C._current_autograd_node()
    return node._sequence_nr() if node is not None else 2**64 - 1


def makes_view(func: Any) -> bool:
    """True if a result of an overload shares the memory of an argument, and is not that argument."""
    return any(result.alias_info is not None and not result.alias_info.is_write for result in func._schema.returns)


def class_of_script_object(instance: torch.ScriptObject) -> str:
    """The name of the C++ class of an object that TorchScript knows, such as packed weights."""
    name: str = instance._type().name()  # type: ignore[attr-defined]
    return name


def writes_out(func: Any) -> bool:
    """True if an overload has arguments `out=`."""
    return any(argument.is_out for argument in func._schema.arguments)


def suggested_format(tensor: torch.Tensor) -> torch.memory_format:
    """The memory format that kernels take a tensor to be in, by the order of its strides; it need not be dense."""
    suggest: Callable[[torch.Tensor], torch.memory_format] = importlib.import_module(
        "torch._prims_common"
    ).suggest_memory_format
    return suggest(tensor)


@functools.cache
def composite_kernel(func: Any) -> Callable[..., Any] | None:
    """Composite kernel of `func`, where one is registered."""
    keys = (torch._C.DispatchKey.CompositeImplicitAutograd, torch._C.DispatchKey.CompositeExplicitAutograd)
    for key in keys:
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key):
            return functools.partial(func._op_dk, key)
    return None


def has_kernel(func: Any, key: str) -> bool:
    """True if an op has a kernel for a dispatch key, such as `AutocastCPU`."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key))


_AUTOCAST: Final[Any] = torch._C._parse_dispatch_key("AutocastPrivateUse1")


def cast_by_autocast(func: Any, args: Any, kwargs: Any, device_type: str, dtype: torch.dtype, *, restores: bool) -> Any:
    """Call an op below autocast, with floating-point tensors of the device cast to `dtype`. float64 tensors stay.

    `restores`: results get the dtype of the first tensor.
    """

    def eligible(given: Any) -> bool:
        is_tensor = isinstance(given, torch.Tensor) and given.device.type == device_type
        return is_tensor and given.is_floating_point() and given.dtype is not torch.float64

    tree = torch.utils._pytree
    first = next((one.dtype for one in tree.tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)), None)
    args, kwargs = tree.tree_map(lambda one: one.to(dtype) if eligible(one) else one, (args, kwargs))
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(_AUTOCAST)):
        made = func(*args, **kwargs)
    return tree.tree_map(lambda one: one.to(first) if eligible(one) else one, made) if restores else made


@functools.cache
def backend_kernel(func: Any) -> Callable[..., Any] | None:
    """Kernel of an op outside `aten` that its library registers for every backend of PyTorch's out-of-tree key, where it does."""
    key = torch._C.DispatchKey.PrivateUse1
    if func.namespace == "aten" or not torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key):
        return None
    return functools.partial(func._op_dk, key)


# `torch.autograd.graph.increment_version` without its slow check of the list. Inference tensors have no version.
increment_versions: Final = torch._C._increment_version


def kernels_raise_versions(func: Any) -> bool:
    """Return True if the ops inside the CPU kernel of `func` increment `_version` of the tensors that `func` writes.

    Autograd increments versions for ops that return the written tensors. Kernels of ops without results either call such ops, or
    write memory directly and leave versions unchanged.
    """
    if has_kernel(func, "ADInplaceOrView"):
        return False  # of `torch.library.custom_op`, which increments them
    return not func._schema.returns and has_kernel(func, "CompositeExplicitAutograd")


def in_forward_mode() -> bool:
    """True if forward-mode differentiation is under way."""
    return torch.autograd.forward_ad._current_level >= 0


def format_elements(tensor: torch.Tensor, indent: int) -> str:
    """The elements of a CPU tensor as PyTorch prints them."""
    text: str = torch._tensor_str._tensor_str(tensor, indent)
    return text


disabled_torch_function = torch._C._disabled_torch_function_impl


no_torch_functions = torch._C.DisableTorchFunctionSubclass


EngineRun = Callable[..., Any]


def wrap_engine(wrap: Callable[[EngineRun], EngineRun]) -> None:
    """Replace the function that runs backward passes, in both modules that hold it."""
    wrapped = wrap(torch.autograd.graph._engine_run_backward)
    torch.autograd.graph._engine_run_backward = wrapped
    torch.autograd._engine_run_backward = wrapped  # type: ignore[attr-defined]


ModuleApply = Callable[..., torch.nn.Module]


def wrap_module_apply(wrap: Callable[[ModuleApply], ModuleApply]) -> None:
    """Replace `torch.nn.Module._apply`, on which `to`, `cpu`, `half` and their like are built."""
    torch.nn.Module._apply = wrap(torch.nn.Module._apply)  # type: ignore[method-assign]


CGenerator: TypeAlias = torch._C.Generator


def replace_classes(**replacements: type) -> None:
    """Make classes in PyTorch's namespace others, by name."""
    for name, replacement in replacements.items():
        setattr(torch, name, replacement)


ModuleCallImpl = Callable[..., Any]


def is_usual_module_call(call: ModuleCallImpl) -> bool:
    """True if `call` is PyTorch's own `Module.__call__`, which calls `_compiled_call_impl` or else `_call_impl`."""
    return call is torch.nn.Module._wrapped_call_impl


def wrap_module_call(wrap: Callable[[ModuleCallImpl], ModuleCallImpl]) -> None:
    """Replace `torch.nn.Module.__call__`."""
    torch.nn.Module.__call__ = wrap(torch.nn.Module.__call__)  # type: ignore[method-assign]


def returns_list(op: str) -> bool:
    """True if an op, such as `aten::split.Tensor`, returns one list of tensors. False for a name that PyTorch does not know."""
    name, _, overload = op.partition(".")
    try:
        schema = torch._C._get_schema(name, overload)
    except RuntimeError:
        return False
    return len(schema.returns) == 1 and str(schema.returns[0].type) == "List[Tensor]"


def without_torch_dispatch() -> AbstractContextManager[Any]:
    """A block in which no `__torch_dispatch__` is called."""
    return torch._C._DisableTorchDispatch()


def boxed_function(namespace: str, name: str) -> Callable[..., Any]:
    """The op `namespace::name`, without the frames that PyTorch puts around it."""
    return getattr(getattr(torch.ops, namespace), name).default._op  # type: ignore[no-any-return]


def overloads_of(namespace: Any) -> Iterator[tuple[str, str, Any]]:
    """The ops of a namespace, such as `torch.ops.aten`: their names, overload names and overloads."""
    for name in dir(namespace):
        packet = getattr(namespace, name)
        if isinstance(packet, torch._ops.OpOverloadPacket):
            for overload in packet.overloads():
                yield name, "" if overload == "default" else overload, getattr(packet, overload)


def rename_backend(name: str) -> None:
    """Make `torch.device(name)` the device of a backend outside of PyTorch."""
    backend_registration.rename_privateuse1_backend(name)


def add_device_module(name: str, module: ModuleType) -> None:
    """Make `module` `torch.<name>`, and give tensors, modules and storages methods of that name."""
    backend_registration.generate_methods_for_privateuse1_backend(for_storage=True)
    torch._register_device_module(name, module)


def own_device_kind() -> int:
    """The number of the device type of a backend outside of PyTorch."""
    kinds: Any = torch._C._autograd.DeviceType
    return int(kinds.PrivateUse1)


def has_python_key(tensor: torch.Tensor) -> bool:
    """True if a `__torch_dispatch__` handles the ops of a tensor."""
    return bool(torch._C._dispatch_keys(tensor).has(torch._C.DispatchKey.Python))


is_transformed: Final[Callable[[torch.Tensor], bool]] = torch._C._functorch.is_functorch_wrapped_tensor


def of_own_class(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` as one of PyTorch's own class, where the user's may say other things of it."""
    if type(tensor) is torch.Tensor:
        return tensor
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(torch.Tensor)


def poison_gradient_node(tensor: torch.Tensor, refuse: Callable[[Any], Any]) -> None:
    """Have `refuse` called where a graph that was recorded already would accumulate a gradient into `tensor`."""
    if tensor.is_leaf and tensor.requires_grad and tensor._use_count() > 1:  # type: ignore[attr-defined]
        torch.autograd.graph.get_gradient_edge(tensor).node.register_prehook(refuse)


def forward_hooks(module: torch.nn.Module) -> list[Callable[..., Any]]:
    """Whatever is called before and after the forward pass of `module`, hooks for all modules included."""
    every = torch.nn.modules.module
    kept = (every._global_forward_hooks, every._global_forward_pre_hooks)
    return [hook for hooks in (*kept, module._forward_hooks, module._forward_pre_hooks) for hook in hooks.values()]


def writes_to(tensor: torch.Tensor) -> int:
    """Version counter of the tensor: PyTorch's writes to its memory; 0 if it does not count that."""
    return 0 if tensor.is_inference() else tensor._version


def unseen_by_function_modes() -> AbstractContextManager[None]:
    """Blocks in which functions on tensors are called as they are, whatever modes are entered."""
    guard: AbstractContextManager[None] = torch._C.DisableTorchFunction()
    return guard


def wrap_element_printing(wrap: Callable[[Callable[..., str]], Callable[..., str]]) -> None:
    """Replace the function that prints the elements of a tensor, given the tensor and its indent."""
    printing: Any = importlib.import_module("torch._tensor_str")
    printing._tensor_str = wrap(printing._tensor_str)


def end_printing() -> None:
    """Turn `torch.func` on again where printing a tensor fails.

    PyTorch turns it off by an object in a variable of the frame that prints. The error's traceback keeps that frame alive, and
    `vmap` would fail in this thread for as long.
    """
    code = torch._tensor_str._str.__code__
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is code:
            frame.f_locals["guard"].__exit__(None, None, None)
        frame = frame.f_back
