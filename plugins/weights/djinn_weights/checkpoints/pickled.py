"""Find the tensors in a pickle of `torch.save` without running code.

A pickle is a program for a stack machine. `pickletools` decodes its instructions, and this module interprets them with
values of its own. Functions and classes in a pickle are never imported. A few names have a known meaning. A pickle with
any other name is refused.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final, TypeVar

import attrs
import torch

from djinn_core.wire.tensors import dtype_name
from djinn_server.weights.headers import LONGEST_NAME, MOST_DIMENSIONS, MOST_TENSORS

OPERATIONS: Final = 4_000_000  # maximum number of instructions: 40 for each of 100,000 tensors
DEPTH: Final = 16  # maximum nesting of dictionaries
_LARGEST: Final = 1 << 62
_MEMO_KEYS: Final = 1 << 32
_STORAGES: Final = MappingProxyType(
    {
        "torch.DoubleStorage": torch.float64,
        "torch.FloatStorage": torch.float32,
        "torch.HalfStorage": torch.float16,
        "torch.BFloat16Storage": torch.bfloat16,
        "torch.LongStorage": torch.int64,
        "torch.IntStorage": torch.int32,
        "torch.ShortStorage": torch.int16,
        "torch.CharStorage": torch.int8,
        "torch.ByteStorage": torch.uint8,
        "torch.BoolStorage": torch.bool,
        "torch.ComplexDoubleStorage": torch.complex128,
        "torch.ComplexFloatStorage": torch.complex64,
        "torch.storage.UntypedStorage": torch.uint8,
    }
)


_T = TypeVar("_T")


@attrs.frozen
class _Global:
    """Name of a function or class in a pickle."""

    path: str


@attrs.frozen
class _Other:
    """A value without tensors."""


@attrs.frozen
class PickledStorage:
    """A storage in a pickle: its name in the archive, and its size in bytes."""

    key: str
    dtype: torch.dtype
    size: int


@attrs.frozen
class PickledTensor:
    """A tensor in a pickle: its storage, and its layout in elements."""

    storage: PickledStorage
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def pickled_tensors(data: bytes) -> dict[str, PickledTensor]:
    """Return the tensors in a pickle. Keys of nested dictionaries, and positions in lists, are joined by dots.

    Raises:
        ValueError: the pickle is malformed, names an unknown class or function, or is not a dictionary with tensors.
    """
    try:
        value = _Machine().run(data)
    except (IndexError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"the pickle is malformed ({type(error).__name__})") from error
    if not isinstance(value, dict):
        raise ValueError("the file has no dictionary of tensors: save the model's state_dict()")  # noqa: TRY004 - the file is wrong
    return _Flattener().tensors(value)


class _Flattener:
    """Collect the tensors of nested dictionaries and lists."""

    def __init__(self) -> None:
        self._found: dict[str, PickledTensor] = {}
        self._seen = 0

    def tensors(self, value: dict[str, Any]) -> dict[str, PickledTensor]:
        """Return the tensors by name."""
        self._add("", value, 0)
        return self._found

    def _add(self, path: str, value: Any, depth: int) -> None:
        if isinstance(value, PickledTensor):
            if path in self._found:
                raise ValueError(f"the file has the tensor {path[:200]!r} twice")
            if len(path) > LONGEST_NAME or len(self._found) >= MOST_TENSORS:
                raise ValueError("the file has too many tensors, or names that are too long")
            self._found[path] = value
        elif isinstance(value, (dict, list, tuple)):
            self._seen += 1 + len(
                value
            )  # a value may be referred to repeatedly, so the file's size does not bound their number
            if depth >= DEPTH or self._seen > OPERATIONS:
                raise ValueError(f"the file has too many values, or values nested more than {DEPTH} deep")
            items = value.items() if isinstance(value, dict) else enumerate(value)
            for key, item in items:
                if isinstance(item, (PickledTensor, dict, list, tuple)):
                    text = str(key)
                    if len(text) > LONGEST_NAME:
                        raise ValueError("the file has a name that is too long")
                    self._add(f"{path}.{text}" if path else text, item, depth + 1)


def _instructions(data: bytes) -> Iterator[tuple[pickletools.OpcodeInfo, Any]]:
    try:
        for operation, argument, _ in pickletools.genops(data):
            yield operation, argument
    except ValueError as error:  # the error text may contain the whole pickle
        raise ValueError(f"the pickle is malformed: {str(error)[:200]}") from None


class _Machine:
    """Stack machine that interprets a pickle: its stack, marks and memo."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self._marks: list[list[Any]] = []
        self._memo: dict[int, Any] = {}

    def run(self, data: bytes) -> Any:
        """Return the value of a pickle."""
        for count, (operation, argument) in enumerate(_instructions(data)):
            if count > OPERATIONS:
                raise ValueError(f"the pickle has more than {OPERATIONS:,} instructions")
            name = operation.name
            if name == "STOP":
                return self.stack.pop()
            if name in _CONSTANTS:
                self.stack.append(argument if argument is not None else _CONSTANTS[name])
                continue
            step = _STEPS.get(name)
            if step is None:
                raise ValueError(f"the pickle has the instruction {name}, which is not supported")
            step(self, argument)
        raise ValueError("the pickle has no end")

    def begin_mark(self, _: Any) -> None:
        self._marks.append(self.stack)
        self.stack = []

    def since_mark(self) -> list[Any]:
        items = self.stack
        self.stack = self._marks.pop()
        return items

    def new_list(self, _: Any) -> None:
        self.stack.append([])

    def new_dict(self, _: Any) -> None:
        self.stack.append({})

    def drop(self, _: Any) -> None:
        if self.stack:
            self.stack.pop()
        else:
            self.since_mark()

    def drop_marked(self, _: Any) -> None:
        self.since_mark()

    def again(self, _: Any) -> None:
        self.stack.append(self.stack[-1])

    def keep(self, argument: Any) -> None:
        key = len(self._memo) if argument is None else argument
        if not 0 <= key < _MEMO_KEYS:
            raise ValueError("the pickle is malformed (memo)")
        self._memo[key] = self.stack[-1]

    def kept(self, argument: Any) -> None:
        self.stack.append(self._memo[argument])

    def list_of_marked(self, _: Any) -> None:
        items = self.since_mark()
        self.stack.append(items)

    def tuple_of_marked(self, _: Any) -> None:
        items = self.since_mark()
        self.stack.append(tuple(items))

    def dict_of_marked(self, _: Any) -> None:
        items = self.since_mark()
        self.stack.append({})
        self.set_all(items)

    def append_item(self, _: Any) -> None:
        item = self.stack.pop()
        _typed(self.stack[-1], list).append(item)

    def append_marked(self, _: Any) -> None:
        items = self.since_mark()
        _typed(self.stack[-1], list).extend(items)

    def set_item(self, _: Any) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self.set_all([key, value])

    def set_marked(self, _: Any) -> None:
        self.set_all(self.since_mark())

    def set_all(self, items: list[Any]) -> None:
        to: dict[str, Any] = _typed(self.stack[-1], dict)
        for key, value in zip(items[::2], items[1::2], strict=True):
            to[_key(key)] = value

    def name(self, argument: Any) -> None:
        self.stack.append(_known(argument.replace(" ", ".")))

    def name_of_stack(self, _: Any) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        self.stack.append(_known(f"{_typed(module, str)}.{_typed(name, str)}"))

    def call(self, _: Any) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        self.stack.append(_result(_typed(function, _Global), _typed(arguments, tuple)))

    def build(self, _: Any) -> None:
        self.stack.pop()
        _typed(self.stack[-1], dict)  # the attribute `_metadata` of a state dict, which has no tensors

    def persistent(self, _: Any) -> None:
        kind, storage, key, _place, count = self.stack.pop()
        path = _typed(storage, _Global).path
        if kind != "storage" or path not in _STORAGES:
            raise ValueError(f"the file has a storage of the type {path!r}, which is not supported")
        dtype = _STORAGES[path]
        self.stack.append(PickledStorage(_typed(key, str), dtype, _number(count) * dtype.itemsize))


_CONSTANTS: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "NONE": None,
        "NEWTRUE": True,
        "NEWFALSE": False,
        "EMPTY_TUPLE": (),
        **dict.fromkeys(
            (
                *("INT", "LONG", "BININT", "BININT1", "BININT2", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
                *("UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
                *("BINSTRING", "SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"),
            )
        ),
    }
)


def _nothing(machine: _Machine, argument: Any) -> None:
    del machine, argument


def _tuple_of(size: int) -> Callable[[_Machine, Any], None]:
    def step(machine: _Machine, _: Any) -> None:
        stack = machine.stack
        items = tuple(stack[-size:])
        if len(items) < size:
            raise ValueError("the pickle is malformed (tuple)")
        stack[-size:] = [items]

    return step


_STEPS: Final[Mapping[str, Callable[[_Machine, Any], None]]] = MappingProxyType(
    {
        "PROTO": _nothing,
        "FRAME": _nothing,
        "MARK": _Machine.begin_mark,
        "POP": _Machine.drop,
        "POP_MARK": _Machine.drop_marked,
        "DUP": _Machine.again,
        "PUT": _Machine.keep,
        "BINPUT": _Machine.keep,
        "LONG_BINPUT": _Machine.keep,
        "MEMOIZE": _Machine.keep,
        "GET": _Machine.kept,
        "BINGET": _Machine.kept,
        "LONG_BINGET": _Machine.kept,
        "EMPTY_LIST": _Machine.new_list,
        "EMPTY_SET": _Machine.new_list,
        "EMPTY_DICT": _Machine.new_dict,
        "LIST": _Machine.list_of_marked,
        "FROZENSET": _Machine.list_of_marked,
        "TUPLE": _Machine.tuple_of_marked,
        "TUPLE1": _tuple_of(1),
        "TUPLE2": _tuple_of(2),
        "TUPLE3": _tuple_of(3),
        "DICT": _Machine.dict_of_marked,
        "APPEND": _Machine.append_item,
        "APPENDS": _Machine.append_marked,
        "ADDITEMS": _Machine.append_marked,
        "SETITEM": _Machine.set_item,
        "SETITEMS": _Machine.set_marked,
        "GLOBAL": _Machine.name,
        "STACK_GLOBAL": _Machine.name_of_stack,
        "REDUCE": _Machine.call,
        "BUILD": _Machine.build,
        "BINPERSID": _Machine.persistent,
    }
)


def _dictionary(items: Any = ()) -> dict[str, Any]:
    return {_key(key): value for key, value in items}


def _tensor(storage: Any, offset: Any, shape: Any, strides: Any, *rest: Any) -> PickledTensor:
    """Interpret `_rebuild_tensor` and `_rebuild_tensor_v2`.

    `rest`: `requires_grad`, hooks and view bits, which are ignored.
    """
    where = _typed(storage, PickledStorage)
    return _laid_out(where, where.dtype, offset, shape, strides, *rest)


def _tensor_of_dtype(
    storage: Any, offset: Any, shape: Any, strides: Any, _grad: Any, _hooks: Any, dtype: Any, *rest: Any
) -> PickledTensor:
    """Interpret `_rebuild_tensor_v3`."""
    return _laid_out(_typed(storage, PickledStorage), _dtype(dtype), offset, shape, strides, None, None, *rest)


def _laid_out(
    storage: PickledStorage,
    dtype: torch.dtype,
    offset: Any,
    shape: Any,
    strides: Any,
    _grad: Any = None,
    _hooks: Any = None,
    view: Any = None,
) -> PickledTensor:
    if view:
        kind = ", ".join(view)[:100] if isinstance(view, dict) else "unknown"
        raise ValueError(f"the file has a tensor view of an unsupported kind ({kind})")
    sizes, steps = tuple(map(_number, _typed(shape, tuple))), tuple(map(_number, _typed(strides, tuple)))
    if len(sizes) != len(steps) or len(sizes) > MOST_DIMENSIONS:
        raise ValueError("the file has a tensor whose strides do not match its shape")
    return PickledTensor(storage, dtype, _number(offset), sizes, steps)


def _parameter(data: Any, *_: Any) -> PickledTensor:
    return _typed(data, PickledTensor)


def _tensor_with_attributes(function: Any, kind: Any, arguments: Any, _state: Any) -> Any:
    """Interpret `_rebuild_from_type_v2`."""
    if _typed(kind, _Global).path not in _TENSOR_TYPES:
        raise ValueError(f"the file has a tensor of the type {kind.path}, which is not supported")
    return _result(_typed(function, _Global), _typed(arguments, tuple))


def _other(*_: Any) -> _Other:
    return _Other()


_FUNCTIONS: Final[Mapping[str, Callable[..., Any]]] = MappingProxyType(
    {
        "collections.OrderedDict": _dictionary,
        "torch._utils._rebuild_tensor": _tensor,
        "torch._utils._rebuild_tensor_v2": _tensor,
        "torch._utils._rebuild_tensor_v3": _tensor_of_dtype,
        "torch._utils._rebuild_parameter": _parameter,
        "torch._utils._rebuild_parameter_with_state": _parameter,
        "torch._tensor._rebuild_from_type_v2": _tensor_with_attributes,
        "torch.Size": _other,
        "torch.device": _other,
        "_codecs.encode": _other,
        "__builtin__.set": _other,
        "builtins.set": _other,
        "__builtin__.bytearray": _other,
        "builtins.bytearray": _other,
        "__builtin__.complex": _other,
        "builtins.complex": _other,
    }
)
_TENSOR_TYPES: Final = frozenset(
    {"torch.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer", "torch._C.TensorBase"}
)
_DTYPES: Final = MappingProxyType(
    {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
)


def _known(path: str) -> _Global:
    if path not in _FUNCTIONS and path not in _STORAGES and path not in _DTYPES and path not in _TENSOR_TYPES:
        raise ValueError(f"the pickle names {path[:200]}, which is not allowed in a file of tensors")
    return _Global(path)


def _result(function: _Global, arguments: tuple[Any, ...]) -> Any:
    """Return the value of a call of `function` in the pickle, without calling it."""
    function_result = _FUNCTIONS.get(function.path)
    if function_result is None:
        raise ValueError(f"the pickle calls {function.path}, which is not allowed")
    return function_result(*arguments)


def _dtype(value: Any) -> torch.dtype:
    dtype = _DTYPES[_typed(value, _Global).path]
    dtype_name(dtype)  # raises for dtypes that need more than bytes
    return dtype


def _key(value: Any) -> str:
    """Return a dictionary key as a part of a tensor name."""
    if isinstance(value, str):
        return value
    # As text: the author of a file could choose numbers with colliding hashes, to make a dictionary slow.
    if value is None or isinstance(value, (float, int)) or (isinstance(value, bytes) and len(value) < LONGEST_NAME):
        return str(value)
    raise ValueError("the file has a dictionary whose keys are neither strings nor numbers")


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _LARGEST:
        raise ValueError("the file has a tensor with an invalid size")
    return value


def _typed(value: Any, kind: type[_T]) -> _T:
    if not isinstance(value, kind):
        raise ValueError(f"the pickle is malformed: it has a {type(value).__name__} instead of a {kind.__name__}")  # noqa: TRY004 - likewise
    return value
