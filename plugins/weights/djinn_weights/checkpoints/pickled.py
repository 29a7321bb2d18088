"""Read the tensors in a pickle of `torch.save` without running code.

A pickle is a program for a stack machine. `pickletools` decodes its instructions, and this module interprets them with
values of its own. It never imports functions and classes of a pickle. A list of names has a known meaning. Any other
name raises ValueError.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final, TypeVar

import attrs
import torch

from djinn_core.wire.tensors import dtype_name
from djinn_server.weights.headers import MAX_DIMENSIONS, MAX_NAME_LENGTH, MAX_TENSORS

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
class _IgnoredValue:
    """A value without tensors."""


@attrs.frozen
class PickledStorage:
    """A storage in a pickle. `key`: name of its record in the archive. `size`: in bytes."""

    key: str
    dtype: torch.dtype
    size: int


@attrs.frozen
class PickledTensor:
    """A tensor in a pickle. `offset` and `strides` count elements of the storage."""

    storage: PickledStorage
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def pickled_tensors(data: bytes) -> dict[str, PickledTensor]:
    """Return the tensors in a pickle by name. A name joins the keys of nested dictionaries and list indices by dots.

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
    """Collector of the tensors in nested dictionaries and lists."""

    def __init__(self) -> None:
        self._tensors: dict[str, PickledTensor] = {}
        self._value_count = 0

    def tensors(self, value: dict[str, Any]) -> dict[str, PickledTensor]:
        """Return the tensors in `value` by name. Raise ValueError if names repeat or a limit is exceeded."""
        self._add("", value, 0)
        return self._tensors

    def _add(self, path: str, value: Any, depth: int) -> None:
        if isinstance(value, PickledTensor):
            if path in self._tensors:
                raise ValueError(f"the file has the tensor {path[:200]!r} twice")
            if len(path) > MAX_NAME_LENGTH or len(self._tensors) >= MAX_TENSORS:
                raise ValueError(f"over {MAX_TENSORS:,} tensors, or a name of over {MAX_NAME_LENGTH:,} characters")
            self._tensors[path] = value
        elif isinstance(value, (dict, list, tuple)):
            self._value_count += 1 + len(
                value
            )  # many references may name one value, so the file's size does not bound the number of values
            if depth >= DEPTH or self._value_count > OPERATIONS:
                raise ValueError(f"the file has too many values, or values nested more than {DEPTH} deep")
            items = value.items() if isinstance(value, dict) else enumerate(value)
            for key, item in items:
                if isinstance(item, (PickledTensor, dict, list, tuple)):
                    text = str(key)
                    if len(text) > MAX_NAME_LENGTH:
                        raise ValueError(f"the file has a name of over {MAX_NAME_LENGTH:,} characters")
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
        """Return the value of a pickle. Raise ValueError if it is malformed, too long or has an unsupported instruction."""
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

    def pop_to_mark(self) -> list[Any]:
        items = self.stack
        self.stack = self._marks.pop()
        return items

    def new_list(self, _: Any) -> None:
        self.stack.append([])

    def new_dict(self, _: Any) -> None:
        self.stack.append({})

    def pop_one(self, _: Any) -> None:
        if self.stack:
            self.stack.pop()
        else:
            self.pop_to_mark()

    def pop_marked(self, _: Any) -> None:
        self.pop_to_mark()

    def duplicate_top(self, _: Any) -> None:
        self.stack.append(self.stack[-1])

    def store_in_memo(self, argument: Any) -> None:
        key = len(self._memo) if argument is None else argument
        if not 0 <= key < _MEMO_KEYS:
            raise ValueError("the pickle is malformed (memo)")
        self._memo[key] = self.stack[-1]

    def push_from_memo(self, argument: Any) -> None:
        self.stack.append(self._memo[argument])

    def list_of_marked(self, _: Any) -> None:
        items = self.pop_to_mark()
        self.stack.append(items)

    def tuple_of_marked(self, _: Any) -> None:
        items = self.pop_to_mark()
        self.stack.append(tuple(items))

    def dict_of_marked(self, _: Any) -> None:
        items = self.pop_to_mark()
        self.stack.append({})
        self.set_items(items)

    def append_item(self, _: Any) -> None:
        item = self.stack.pop()
        _checked_type(self.stack[-1], list).append(item)

    def append_marked(self, _: Any) -> None:
        items = self.pop_to_mark()
        _checked_type(self.stack[-1], list).extend(items)

    def set_item(self, _: Any) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self.set_items([key, value])

    def set_marked(self, _: Any) -> None:
        self.set_items(self.pop_to_mark())

    def set_items(self, items: list[Any]) -> None:
        dictionary: dict[str, Any] = _checked_type(self.stack[-1], dict)
        for key, value in zip(items[::2], items[1::2], strict=True):
            dictionary[_name_part(key)] = value

    def push_name(self, argument: Any) -> None:
        self.stack.append(_allowed_name(argument.replace(" ", ".")))

    def push_name_from_stack(self, _: Any) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        self.stack.append(_allowed_name(f"{_checked_type(module, str)}.{_checked_type(name, str)}"))

    def call_function(self, _: Any) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        self.stack.append(_interpret_call(_checked_type(function, _Global), _checked_type(arguments, tuple)))

    def set_state(self, _: Any) -> None:
        self.stack.pop()
        _checked_type(self.stack[-1], dict)  # the attribute `_metadata` of a state dict, which has no tensors

    def push_storage(self, _: Any) -> None:
        record_kind, storage, key, _device, count = self.stack.pop()
        path = _checked_type(storage, _Global).path
        if record_kind != "storage" or path not in _STORAGES:
            raise ValueError(f"the file has a storage of the type {path!r}, which is not supported")
        dtype = _STORAGES[path]
        self.stack.append(PickledStorage(_checked_type(key, str), dtype, _checked_size(count) * dtype.itemsize))


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


def _do_nothing(machine: _Machine, argument: Any) -> None:
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
        "PROTO": _do_nothing,
        "FRAME": _do_nothing,
        "MARK": _Machine.begin_mark,
        "POP": _Machine.pop_one,
        "POP_MARK": _Machine.pop_marked,
        "DUP": _Machine.duplicate_top,
        "PUT": _Machine.store_in_memo,
        "BINPUT": _Machine.store_in_memo,
        "LONG_BINPUT": _Machine.store_in_memo,
        "MEMOIZE": _Machine.store_in_memo,
        "GET": _Machine.push_from_memo,
        "BINGET": _Machine.push_from_memo,
        "LONG_BINGET": _Machine.push_from_memo,
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
        "GLOBAL": _Machine.push_name,
        "STACK_GLOBAL": _Machine.push_name_from_stack,
        "REDUCE": _Machine.call_function,
        "BUILD": _Machine.set_state,
        "BINPERSID": _Machine.push_storage,
    }
)


def _dictionary(items: Any = ()) -> dict[str, Any]:
    return {_name_part(key): value for key, value in items}


def _tensor(storage: Any, offset: Any, shape: Any, strides: Any, *_extra: Any) -> PickledTensor:
    """Interpret `_rebuild_tensor` and `_rebuild_tensor_v2`.

    `_extra`: `requires_grad` and hooks, which are ignored, and metadata such as the conjugate bit, which is refused.
    """
    checked_storage = _checked_type(storage, PickledStorage)
    return _strided_tensor(checked_storage, checked_storage.dtype, offset, shape, strides, *_extra)


def _tensor_of_dtype(
    storage: Any, offset: Any, shape: Any, strides: Any, _grad: Any, _hooks: Any, dtype: Any, *_extra: Any
) -> PickledTensor:
    """Interpret `_rebuild_tensor_v3`."""
    return _strided_tensor(
        _checked_type(storage, PickledStorage), _dtype(dtype), offset, shape, strides, None, None, *_extra
    )


def _strided_tensor(
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
    sizes, steps = (
        tuple(map(_checked_size, _checked_type(shape, tuple))),
        tuple(map(_checked_size, _checked_type(strides, tuple))),
    )
    if len(sizes) != len(steps) or len(sizes) > MAX_DIMENSIONS:
        raise ValueError("the file has a tensor whose strides do not match its shape")
    return PickledTensor(storage, dtype, _checked_size(offset), sizes, steps)


def _parameter(data: Any, *_: Any) -> PickledTensor:
    return _checked_type(data, PickledTensor)


def _tensor_with_attributes(function: Any, kind: Any, arguments: Any, _state: Any) -> Any:
    """Interpret `_rebuild_from_type_v2`."""
    if _checked_type(kind, _Global).path not in _TENSOR_TYPES:
        raise ValueError(f"the file has a tensor of the type {kind.path}, which is not supported")
    return _interpret_call(_checked_type(function, _Global), _checked_type(arguments, tuple))


def _ignored(*_: Any) -> _IgnoredValue:
    return _IgnoredValue()


_FUNCTIONS: Final[Mapping[str, Callable[..., Any]]] = MappingProxyType(
    {
        "collections.OrderedDict": _dictionary,
        "torch._utils._rebuild_tensor": _tensor,
        "torch._utils._rebuild_tensor_v2": _tensor,
        "torch._utils._rebuild_tensor_v3": _tensor_of_dtype,
        "torch._utils._rebuild_parameter": _parameter,
        "torch._utils._rebuild_parameter_with_state": _parameter,
        "torch._tensor._rebuild_from_type_v2": _tensor_with_attributes,
        "torch.Size": _ignored,
        "torch.device": _ignored,
        "_codecs.encode": _ignored,
        "__builtin__.set": _ignored,
        "builtins.set": _ignored,
        "__builtin__.bytearray": _ignored,
        "builtins.bytearray": _ignored,
        "__builtin__.complex": _ignored,
        "builtins.complex": _ignored,
    }
)
_TENSOR_TYPES: Final = frozenset(
    {"torch.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer", "torch._C.TensorBase"}
)
_DTYPES: Final = MappingProxyType(
    {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
)


def _allowed_name(path: str) -> _Global:
    if path not in _FUNCTIONS and path not in _STORAGES and path not in _DTYPES and path not in _TENSOR_TYPES:
        raise ValueError(f"the pickle names {path[:200]}, which is not allowed in a file of tensors")
    return _Global(path)


def _interpret_call(function: _Global, arguments: tuple[Any, ...]) -> Any:
    """Return the value of the call `function(*arguments)` in a pickle. Run this module's replacement of the function."""
    replacement = _FUNCTIONS.get(function.path)
    if replacement is None:
        raise ValueError(f"the pickle calls {function.path}, which is not allowed")
    return replacement(*arguments)


def _dtype(value: Any) -> torch.dtype:
    dtype = _DTYPES[_checked_type(value, _Global).path]
    dtype_name(dtype)  # raises for dtypes that need more than bytes
    return dtype


def _name_part(value: Any) -> str:
    """Return the text of a dictionary key, a part of a tensor name."""
    if isinstance(value, str):
        return value
    # As text: the author of a file could choose numbers with colliding hashes, to make a dictionary slow.
    if value is None or isinstance(value, (float, int)) or (isinstance(value, bytes) and len(value) < MAX_NAME_LENGTH):
        return str(value)
    raise ValueError("the file has a dictionary whose keys are neither strings nor numbers")


def _checked_size(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _LARGEST:
        raise ValueError("the file has a tensor with an invalid size")
    return value


def _checked_type(value: Any, kind: type[_T]) -> _T:
    if not isinstance(value, kind):
        raise ValueError(f"the pickle is malformed: it has a {type(value).__name__} instead of a {kind.__name__}")  # noqa: TRY004 - likewise
    return value
