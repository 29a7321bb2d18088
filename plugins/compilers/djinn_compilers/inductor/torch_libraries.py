"""Private APIs of inductor that build and load libraries."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import torch

from djinn.hooks import CompilerContext


def compile_library(context: CompilerContext, options: Mapping[str, Any]) -> bytes:
    """Compile a template, and return the native library for `load_library`. Takes seconds.

    On CPUs the library is the extension module that inductor creates for `torch.compile` with a wrapper in C++. It has
    a third of the C++ code of an ahead-of-time package. Other devices, and ops that need a call through Python, get an
    ahead-of-time package. Example inputs on an accelerator have no memory on it, because sessions need the memory.

    `options`: inductor options that differ from the defaults.
    """
    module, grows = context.graph_module, context.grows
    if context.device.type != "cpu":
        return _compile_package(module, _inputs_without_memory(context), grows, options)
    library = _compile_extension(copy.deepcopy(module), context.inputs, grows, options)
    return _compile_package(module, context.inputs, grows, options) if library is None else library


def _inputs_without_memory(context: CompilerContext) -> Sequence[torch.Tensor]:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    with FakeTensorMode(shape_env=ShapeEnv()):
        return context.inputs


def prepare_to_compile() -> None:
    """Import the modules of `compile_library`, and run pattern matching on a small graph without compiling it.

    Takes seconds.
    """
    compiling = importlib.import_module("torch._inductor.compile_fx")
    graph = torch.fx.Graph()
    graph.output((graph.call_function(torch.ops.aten.neg.default, (graph.placeholder("x"),)),))
    with torch.no_grad():
        module = torch.fx.GraphModule({}, graph)
        compiling.compile_fx(module, [torch.zeros(4)], inner_compile=lambda traced, *_args, **_options: traced)


# An extension module is built from two files. In one file, the C++ optimizer would spend more time on the wrapper than
# on the kernels.
_FAST_BUILD_OPTIONS: Final[Mapping[str, object]] = {
    "cpp_wrapper_build_separate": True,
    "aot_inductor.compile_wrapper_opt_level": "O0",
    "aot_inductor.enable_line_tables": False,
}


_PRECOMPILED_HEADERS: Final = (".gch", ".pch")


@contextmanager
def _compile_files_in_parallel() -> Iterator[None]:
    """Make inductor compile the two files of an extension module, and their precompiled headers, in parallel."""
    codecache: Any = importlib.import_module("torch._inductor.codecache")
    build = codecache._worker_compile_cpp

    with ThreadPoolExecutor(2) as pool:
        headers: list[Future[None]] = []

        def build_at_once(lock_path: str, builders: Sequence[Any]) -> None:
            *sources, last = builders
            if last.get_target_file_path().endswith(_PRECOMPILED_HEADERS):
                headers.append(pool.submit(build, lock_path, builders))
                return
            _wait_for_compilers([*headers])
            _wait_for_compilers([pool.submit(build, f"{lock_path}.{i}", (source,)) for i, source in enumerate(sources)])
            build(lock_path, (last,))

        codecache._worker_compile_cpp = build_at_once
        try:
            yield
        finally:
            codecache._worker_compile_cpp = build


def _wait_for_compilers(compilations: Sequence[Future[None]]) -> None:
    for future in compilations:
        future.result()


def _export(
    module: torch.fx.GraphModule, inputs: Sequence[torch.Tensor], grows: Mapping[int, Sequence[int]]
) -> torch.export.ExportedProgram:
    auto = torch.export.Dim.AUTO
    sizes = tuple([dict.fromkeys(grows[i], auto) if grows.get(i) else None for i in range(len(inputs))])
    with torch.no_grad():
        return torch.export.export(module, tuple(inputs), dynamic_shapes=sizes, strict=False)


_EXTENSION: Final = "inductor_entry_cpp"  # name of the function in inductor's extension modules, and their file suffix


_THROUGH_PYTHON: Final = b"custom_op_wrapper"  # symbol of an extension module that calls an op through Python


_ELF: Final = b"\x7fELF"


def _compile_extension(
    module: torch.fx.GraphModule,
    inputs: Sequence[torch.Tensor],
    grows: Mapping[int, Sequence[int]],
    options: Mapping[str, Any],
) -> bytes | None:
    """Return an extension module, or None if it is not self-contained.

    The module runs once in this process, on `inputs`, so that a crash happens in this process and not in the
    executor.
    """
    compiling = importlib.import_module("torch._inductor.compile_fx")
    if grows:  # the placeholders define which sizes are symbolic
        module = _export(module, inputs, grows).module(check_guards=False)
        module.graph.set_codegen(torch.fx.graph.CodeGen())
        module.recompile()
    outputs = len(next(iter(reversed(module.graph.nodes))).args[0])
    constants: list[object] = []

    def compile_graph(*args: Any, **kwargs: Any) -> Any:
        code = compiling.compile_fx_inner(*args, **kwargs)
        constants.extend(code.constants or ())
        return code

    before = set(sys.modules)
    inductor_config = importlib.import_module("torch._inductor.config").get_config_copy()
    quickly = {name: value for name, value in _FAST_BUILD_OPTIONS.items() if name in inductor_config}
    with torch.no_grad(), _compile_files_in_parallel():
        patches = {"cpp_wrapper": True, "fx_graph_cache": False, **quickly, **options}
        compiling.compile_fx(module, list(inputs), inner_compile=compile_graph, config_patches=patches)
    extensions = [name for name in sys.modules.keys() - before if name.rpartition(".")[2] == _EXTENSION]
    if constants or len(extensions) != 1:
        return None
    extension = sys.modules.pop(extensions[0])
    content = Path(str(extension.__file__)).read_bytes()
    if _THROUGH_PYTHON in content or not content.startswith(_ELF):
        return None
    with torch.inference_mode():
        results = _runner(extension)(list(inputs))
    return content if len(results) == outputs else None


def _compile_package(
    module: torch.fx.GraphModule,
    inputs: Sequence[torch.Tensor],
    grows: Mapping[int, Sequence[int]],
    options: Mapping[str, Any],
) -> bytes:
    exported_program = _export(module, inputs, grows)
    inductor = importlib.import_module("torch._inductor")
    with tempfile.TemporaryDirectory(prefix="djinn-compile-") as folder:
        path = os.fspath(Path(folder) / "template.pt2")
        inductor.aoti_compile_and_package(exported_program, package_path=path, inductor_configs=dict(options))
        return Path(path).read_bytes()


def load_library(package: bytes, device: torch.device) -> Callable[[list[torch.Tensor]], list[torch.Tensor]]:
    """Return the function of a library from `compile_library`. It is not thread-safe.

    `torch._inductor` is not imported, because the import holds the interpreter's lock for a second.
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
    os.environ["_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"] = address  # where the module expects it at load time
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
