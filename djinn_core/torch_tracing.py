"""The private functions of Dynamo, AOTAutograd, inductor and DTensor that Djinn needs; `torch_private.missing` says which are not there.

PyTorch imports some of them, for a second, where it only has to ask whether they are in use: `spare_dtensor` and `spare_dynamo`.
"""

from __future__ import annotations

import copy
import functools
import importlib
import importlib.util
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, Final, TypeVar

import torch
import torch._compile
import torch._refs
import torch.utils._python_dispatch

F = TypeVar("F", bound=Callable[..., Any])
# Is asked for every op that is called inside it, before it runs.
DispatchMode = torch.utils._python_dispatch.TorchDispatchMode


def trace_as_plain(cls: type[torch.Tensor], wanted: Callable[[Any], bool]) -> None:
    """Have Dynamo trace tensors of `cls` as plain ones, where `wanted` says so of what compiles (see `backend_of`).

    By itself it takes tensors of a class with a `__torch_dispatch__` for objects that it knows nothing of.
    """
    builder = importlib.import_module("torch._dynamo.variables.builder").VariableBuilder
    wrap = builder._wrap

    @functools.wraps(wrap)
    def wrap_plain(self: Any, value: Any) -> Any:
        if type(value) is cls and wanted(self.tx.output.compiler_fn):
            return self.wrap_tensor(value)
        return wrap(self, value)

    builder._wrap = wrap_plain


def backend_of(compiler: Any) -> Any:
    """The backend that the user asked for, behind the wrappers that PyTorch puts around it."""
    while inner := getattr(compiler, "_torchdynamo_orig_backend", None) or getattr(compiler, "__wrapped__", None):
        compiler = inner
    return getattr(compiler, "compiler_fn", compiler)


def takes_list(function: F) -> F:
    """Tell AOTAutograd that `function` takes its inputs as one list, which it may empty to free them early."""
    function._boxed_call = True  # type: ignore[attr-defined]
    return function


def compile_library(
    module: torch.fx.GraphModule,
    inputs: Sequence[torch.Tensor],
    grows: Mapping[int, Sequence[int]],
    options: Mapping[str, Any],
) -> bytes:
    """A native library for `module`, for inputs like `inputs`, as `load_library` takes it. Takes seconds.

    On CPUs it is the extension module that inductor makes for `torch.compile` with a wrapper in C++, a third of the C++ of an ahead-of-time
    package. Such a package it is on other devices, and where an op would have to be called through Python.

    `grows` has by input the dimensions whose sizes may be others, `options` what is set of inductor beside its defaults.
    """
    on_cpu = all(tensor.device.type == "cpu" for tensor in inputs)
    made = _compile_extension(copy.deepcopy(module), inputs, grows, options) if on_cpu else None
    return _compile_package(module, inputs, grows, options) if made is None else made


def prepare_to_compile() -> None:
    """Import what `compile_library` needs, and have it look for patterns in a small graph, which it then does not compile. Takes seconds."""
    compiling = importlib.import_module("torch._inductor.compile_fx")
    graph = torch.fx.Graph()
    graph.output((graph.call_function(torch.ops.aten.neg.default, (graph.placeholder("x"),)),))
    with torch.no_grad():
        module = torch.fx.GraphModule({}, graph)
        compiling.compile_fx(module, [torch.zeros(4)], inner_compile=lambda traced, *_args, **_options: traced)


# An extension module is built in two files: of one file, the optimizer takes longer for the wrapper, which runs once a call, than for kernels.
_QUICKLY_BUILT: Final[Mapping[str, object]] = {
    "cpp_wrapper_build_separate": True,
    "aot_inductor.compile_wrapper_opt_level": "O0",
    "aot_inductor.enable_line_tables": False,
}
_PRECOMPILED: Final = (".gch", ".pch")


@contextmanager
def _both_files_at_once() -> Iterator[None]:
    """Have inductor compile the two files of an extension module at the same time, and likewise the headers that they begin with."""
    codecache: Any = importlib.import_module("torch._inductor.codecache")
    build = codecache._worker_compile_cpp

    with ThreadPoolExecutor(2) as pool:
        headers: list[Future[None]] = []

        def build_at_once(lock_path: str, builders: Sequence[Any]) -> None:
            *sources, last = builders
            if last.get_target_file_path().endswith(_PRECOMPILED):
                headers.append(pool.submit(build, lock_path, builders))
                return
            _wait_for([*headers])
            _wait_for([pool.submit(build, f"{lock_path}.{i}", (source,)) for i, source in enumerate(sources)])
            build(lock_path, (last,))

        codecache._worker_compile_cpp = build_at_once
        try:
            yield
        finally:
            codecache._worker_compile_cpp = build


def _wait_for(building: Sequence[Future[None]]) -> None:
    for future in building:
        future.result()


def _exported(
    module: torch.fx.GraphModule, inputs: Sequence[torch.Tensor], grows: Mapping[int, Sequence[int]]
) -> torch.export.ExportedProgram:
    auto = torch.export.Dim.AUTO
    sizes = tuple([dict.fromkeys(grows[i], auto) if grows.get(i) else None for i in range(len(inputs))])
    with torch.no_grad():
        return torch.export.export(module, tuple(inputs), dynamic_shapes=sizes, strict=False)


_EXTENSION: Final = (
    "inductor_entry_cpp"  # the function in inductor's extension modules, and the last part of their names
)
_THROUGH_PYTHON: Final = b"custom_op_wrapper"  # what an extension module looks up that calls an op through Python
_ELF: Final = b"\x7fELF"


def _compile_extension(
    module: torch.fx.GraphModule,
    inputs: Sequence[torch.Tensor],
    grows: Mapping[int, Sequence[int]],
    options: Mapping[str, Any],
) -> bytes | None:
    """An extension module; None if it would not stand for itself. It is run once here, on `inputs`: what crashes does it here."""
    compiling = importlib.import_module("torch._inductor.compile_fx")
    if grows:  # the placeholders say which sizes are symbols
        module = _exported(module, inputs, grows).module(check_guards=False)
        module.graph.set_codegen(torch.fx.graph.CodeGen())
        module.recompile()
    outputs = len(next(iter(reversed(module.graph.nodes))).args[0])
    constants: list[object] = []

    def compile_graph(*args: Any, **kwargs: Any) -> Any:
        code = compiling.compile_fx_inner(*args, **kwargs)
        constants.extend(code.constants or ())
        return code

    before = set(sys.modules)
    known = importlib.import_module("torch._inductor.config").get_config_copy()
    quickly = {name: value for name, value in _QUICKLY_BUILT.items() if name in known}
    with torch.no_grad(), _both_files_at_once():
        patches = {"cpp_wrapper": True, "fx_graph_cache": False, **quickly, **options}
        compiling.compile_fx(module, list(inputs), inner_compile=compile_graph, config_patches=patches)
    made = [name for name in sys.modules.keys() - before if name.rpartition(".")[2] == _EXTENSION]
    if constants or len(made) != 1:
        return None
    extension = sys.modules.pop(made[0])
    content = Path(str(extension.__file__)).read_bytes()
    if _THROUGH_PYTHON in content or not content.startswith(_ELF):
        return None
    with torch.inference_mode():
        found = _runner(extension)(list(inputs))
    return content if len(found) == outputs else None


def _compile_package(
    module: torch.fx.GraphModule,
    inputs: Sequence[torch.Tensor],
    grows: Mapping[int, Sequence[int]],
    options: Mapping[str, Any],
) -> bytes:
    exported = _exported(module, inputs, grows)
    inductor = importlib.import_module("torch._inductor")
    with tempfile.TemporaryDirectory(prefix="djinn-compile-") as folder:
        path = os.fspath(Path(folder) / "template.pt2")
        inductor.aoti_compile_and_package(exported, package_path=path, inductor_configs=dict(options))
        return Path(path).read_bytes()


def load_library(package: bytes, device: torch.device) -> Callable[[list[torch.Tensor]], list[torch.Tensor]]:
    """The function in a library that `compile_library` made. One thread at a time may call it.

    `torch._inductor` is not imported: it takes a second, with the interpreter's lock held.
    """
    if package.startswith(_ELF):
        return _load_extension(package)
    with _file_of(package, ".pt2") as path:
        index = device.index if device.type != "cpu" else -1
        loader = torch._C._aoti.AOTIModelPackageLoader(path, "model", True, 1, index)
    run: Callable[[list[torch.Tensor]], list[torch.Tensor]] = loader.run
    return run


@contextmanager
def _file_of(content: bytes, suffix: str) -> Iterator[str]:
    with tempfile.NamedTemporaryFile(prefix="djinn-compiled-", suffix=suffix) as file:
        file.write(content)
        file.flush()
        yield file.name


def _load_extension(content: bytes) -> Callable[[list[torch.Tensor]], list[torch.Tensor]]:
    address = str(torch._C._dynamo.guards._torchinductor_pyobject_tensor_data_ptr)  # type: ignore[attr-defined]
    os.environ["_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"] = address  # where such a module expects it when it is loaded
    with _file_of(content, ".so") as path:
        spec = importlib.util.spec_from_file_location(f"{Path(path).stem}.{_EXTENSION}", path)
        assert spec is not None
        assert spec.loader is not None
        extension = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(extension)
    return _runner(extension)


def _runner(extension: ModuleType) -> Callable[[list[torch.Tensor]], list[torch.Tensor]]:
    run = getattr(extension, _EXTENSION)
    handles = torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors
    tensors = torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs

    def run_extension(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        return tensors(run(handles(inputs)))

    return run_extension


def load_early() -> None:
    """Import what PyTorch itself imports at the first op on a tensor subclass and at its first meta kernel.

    The one asks whether the tensor is a DTensor (unless `spare_dtensor` was called), the other whether dynamo is off. Together they
    take a second.
    """
    if torch.distributed.is_available() and _DTensorKind.spared is None:
        importlib.import_module(_DTENSOR_MODULE)
    importlib.import_module("torch._dynamo")


_DTENSOR_MODULE: Final = "torch.distributed.tensor"


class _DTensorKind(type):
    """Class of the stand-in for `DTensor`: nothing is an instance until the module is imported, then what is one of the real class.

    C++ asks at each op on a tensor subclass, so `__instancecheck__` is a function of C throughout: `count` of an empty tuple is 0.
    """

    spared: type | None = None
    __instancecheck__ = ().count  # type: ignore[assignment]

    def __getattr__(cls, name: str) -> Any:
        return getattr(sys.modules[_DTENSOR_MODULE].DTensor, name)


class _StandInModule(ModuleType):
    """Module with the stand-in for `DTensor`; other threads, which import it meanwhile, wait and find what the real one has.

    Attributes:
        over: set when it is no longer among the modules.
    """

    def __init__(self, stand_in: type) -> None:
        super().__init__(_DTENSOR_MODULE)
        self.over = threading.Event()
        self._stand_in, self._thread = stand_in, threading.get_ident()

    def __getattr__(self, name: str) -> Any:
        if threading.get_ident() != self._thread:
            self.over.wait()
            return getattr(importlib.import_module(_DTENSOR_MODULE), name)
        if name == "DTensor":
            return self._stand_in
        raise AttributeError(name)


def spare_dtensor(call_on_import: Callable[[str, Callable[[Any], None]], None]) -> None:
    """Keep PyTorch from importing `torch.distributed.tensor`, and sympy with it, only to ask at an op whether a tensor is a DTensor.

    It looks the class up once, at the first op on a tensor subclass, and finds a stand-in here. `call_on_import` has a function called
    with a module when the program imports it: DTensors are recognised from then on.
    """
    if not torch.distributed.is_available() or _DTENSOR_MODULE in sys.modules or _DTensorKind.spared is not None:
        return
    stand_in = _DTensorKind("DTensor", (), {})
    module = _StandInModule(stand_in)
    sys.modules[_DTENSOR_MODULE] = module
    try:
        torch.ops.aten._assert_async.default(_RuleProbe._make_wrapper_subclass(_RuleProbe, (1,)))
    except AttributeError:  # of the real one, which another thread has half imported: PyTorch asks again at the next op
        if sys.modules.get(_DTENSOR_MODULE) is module:
            raise
    finally:
        if sys.modules.get(_DTENSOR_MODULE) is module:
            del sys.modules[_DTENSOR_MODULE]
        module.over.set()

    def come(real: Any) -> None:
        _DTensorKind.__instancecheck__ = type.__instancecheck__.__get__(real.DTensor)  # type: ignore[method-assign]

    call_on_import(_DTENSOR_MODULE, come)
    _DTensorKind.spared = stand_in


def spare_dynamo(call_on_import: Callable[[str, Callable[[Any], None]], None]) -> None:
    """Keep PyTorch from importing `torch._dynamo` at the first meta kernel that is written in Python.

    Such kernels are wrapped so that dynamo does not trace them; as long as it is not imported, nothing traces, and they are called as
    they are. PyTorch keeps what it calls in an attribute of the kernel.
    """
    if "torch._dynamo" in sys.modules:
        return
    kernels = _kernels_hidden_from_dynamo()
    for kernel in kernels:
        setattr(kernel, _UNTRACED, kernel)

    def come(_: Any) -> None:
        for kernel in kernels:
            if vars(kernel).get(_UNTRACED) is kernel:
                delattr(kernel, _UNTRACED)

    call_on_import("torch._dynamo", come)


_UNTRACED: Final = "__dynamo_disable"


def _kernels_hidden_from_dynamo() -> list[Any]:
    refs = torch._refs
    modules = refs, refs.linalg, refs.nn.functional, refs.special
    found = [_hidden_from_dynamo(function) for module in modules for function in vars(module).values()]
    return [kernel for kernel in found if kernel is not None]


def _hidden_from_dynamo(function: Any) -> Any:
    """The function that `torch._disable_dynamo` was given where it made `function`, or one that `function` wraps; else None."""
    hides = _hiding_code()
    while (code := getattr(function, "__code__", None)) is not None:
        # Wrappers call their `fn`; those of one operand say in `__wrapped__` that they wrap something else.
        inner = function.__closure__[code.co_freevars.index("fn")].cell_contents if "fn" in code.co_freevars else None
        if code is hides:
            return inner
        function = inner or getattr(function, "__wrapped__", None)
    return None


@functools.cache
def _hiding_code() -> CodeType:
    """The code of each function that `torch._disable_dynamo` makes."""
    code: CodeType = torch._compile._disable_dynamo(_hidden_from_dynamo).__code__
    return code


class _RuleProbe(torch.Tensor):
    """A tensor subclass on which an op does nothing."""

    @classmethod
    def __torch_dispatch__(cls, *_: Any) -> None:
        """Do nothing."""
