"""Run a program statement by statement on a device, and record the facts that a program can see of each tensor.

A program is Python source. The name `D` is the device, and `torch`, `nn` and `F` are imported. An exception ends only
its statement.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import io
import re
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CodeType
from typing import Any

import attrs
import torch

import djinn
from djinn_client.interception.dispatch import forget_learnt_calls

REMOTE = "remote_accelerator:0"

# Exception types that callers distinguish, narrower ones first.
KINDS = (
    torch.linalg.LinAlgError,
    NotImplementedError,
    IndexError,
    KeyError,
    ValueError,
    TypeError,
    AttributeError,
    AssertionError,
    OverflowError,
    ZeroDivisionError,
    NameError,
    RuntimeError,
    Exception,
)

# Further names of a program, each made by a function of the device.
Names = Mapping[str, Callable[[str], Any]]

# By place (a name, or a part of its value) and property. The place "" is the statement itself.
Facts = dict[tuple[str, str], Any]


@attrs.frozen(eq=False)
class Value:
    """A fetched tensor. It is equal to a tensor with the same bits, except payloads of NaNs."""

    tensor: torch.Tensor

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Value) and _same_bits(self.tensor, other.tensor)

    def __hash__(self) -> int:
        return 0

    def __str__(self) -> str:
        return str(self.tensor.flatten()[:24].tolist())


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    if a.is_floating_point():
        if a.itemsize == 1:
            a, b = a.float(), b.float()
        if not torch.equal(a.isnan(), b.isnan()):
            return False
        a, b = (t.masked_fill(t.isnan(), 0) for t in (a, b))
    return torch.equal(*(t.reshape(-1).view(torch.uint8) for t in (a, b)))


def split(source: str) -> list[str]:
    """Split a program into its statements."""
    lines = source.splitlines()
    return [
        "\n".join(lines[node.lineno - 1 : node.end_lineno]) for node in ast.parse(source).body if not _is_text(node)
    ]


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


@functools.lru_cache(4096)
def _compiled(statement: str) -> CodeType:
    return compile(statement, statement, "exec")


def in_threads(*functions: Callable[[], Any]) -> list[Any]:
    """Call the functions concurrently, one thread each. Return the results."""
    results: list[Any] = [None] * len(functions)
    errors: list[BaseException] = []

    def call(number: int) -> None:
        try:
            results[number] = functions[number]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=call, args=(number,)) for number in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


class Runner:
    """Execute statements on one device, in one namespace."""

    def __init__(self, device: str, extra: Names | None = None) -> None:
        self.device = device
        self.names: dict[str, Any] = {
            "D": device, "torch": torch, "nn": torch.nn, "F": torch.nn.functional, "in_threads": in_threads,
        } | {name: make(device) for name, make in (extra or {}).items()}  # fmt: skip
        self._given = frozenset(self.names)
        self._heard: list[warnings.WarningMessage] = []

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Record warnings in the block."""
        before = torch.is_warn_always_enabled()
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            torch.set_warn_always(True)
            self._heard = heard
            try:
                yield
            finally:
                torch.set_warn_always(before)

    def step(self, statement: str) -> Facts:
        """Execute one statement. Return the facts after it, without reading elements."""
        facts: Facts = {}
        printed = io.StringIO()
        self._heard.clear()
        with contextlib.redirect_stdout(printed):
            try:
                exec(_compiled(statement), self.names)
            except Exception as error:
                facts["", "error"] = _raised(error)
        if printed.tell():
            facts["", "printed"] = " ".join(self._neutral(printed.getvalue()).split())
        if self._heard:
            facts["", "warnings"] = [(w.category.__name__, self._neutral(str(w.message))) for w in self._heard]
        for place, result in self.found():
            if isinstance(result, torch.Tensor):
                for name, value in self._looks(result).items():
                    facts[place, name] = value
            elif isinstance(result, (int, float, complex, str, bool, type(None), torch.dtype)):
                facts[place, "value"] = self._neutral(
                    " ".join(result.split()) if isinstance(result, str) else repr(result)
                )
        return facts

    def found(self) -> list[tuple[str, Any]]:
        """Return the values of the program by name, with the items of lists and dicts."""
        return list(_parts({name: value for name, value in self.names.items() if _is_own(name, self._given)}))

    def finish(self) -> Facts:
        """Return the elements of all tensors, and which tensors share memory."""
        references = {place: tensor for place, tensor in self.found() if isinstance(tensor, torch.Tensor)}
        references |= {f"{p}.grad": t.grad for p, t in references.items() if _gradient(t)}
        facts: Facts = {}
        first: dict[int, str] = {}
        for place, tensor in references.items():
            if tensor.layout == torch.strided:
                facts[place, "shares"] = first.setdefault(tensor.untyped_storage()._cdata, place)
        try:
            local_tensors = _fetched(list(references.values()))
        except Exception as error:
            return facts | {("", "error"): _raised(error)}
        for place, tensor in zip(references, local_tensors, strict=True):
            facts[place, "value"] = Value(tensor)
        return facts

    def _looks(self, tensor: torch.Tensor) -> dict[str, Any]:
        looks: dict[str, Any] = {}
        for name, look in LOOKS.items():
            try:
                looks[name] = look(tensor)
            except Exception as error:  # for example a view whose base was written illegally under autograd
                looks[name] = str(error)
        base = tensor._base
        if base is not None:
            names = [name for name, references in self.names.items() if references is base]
            looks["base"] = names or (tuple(base.shape), base.storage_offset(), base.dtype)
        return looks

    def _neutral(self, text: str) -> str:
        text = re.sub(r" \(Triggered internally at .*\)", "", text)
        text = re.sub(r",\s*device=['\"](remote_accelerator|cpu)(:\d+)?['\"]", "", text)
        return re.sub(r"0x[0-9a-f]{6,}", "0x", re.sub(r"remote_accelerator(:\d+)?", "cpu", text))


def _steps(tensor: torch.Tensor) -> list[int | None]:
    steps = zip(tensor.stride(), tensor.shape, strict=True)
    return [step if size > 1 and tensor.numel() else None for step, size in steps]


def _gradient(tensor: torch.Tensor) -> Any:
    try:
        grad = tensor.grad if tensor.is_leaf else None
    except Exception:  # as for `is_leaf`
        return None
    return None if grad is None else (tuple(grad.shape), grad.dtype, grad.requires_grad)


# Properties of a tensor without its elements.
LOOKS: dict[str, Callable[[torch.Tensor], Any]] = {
    "device": lambda t: t.device.type.replace("remote_accelerator", "cpu"),
    "shape": lambda t: tuple(t.shape),
    "dtype": lambda t: t.dtype,
    "layout": lambda t: t.layout,
    "stride": lambda t: _steps(t) if t.layout == torch.strided else None,
    "idle stride": lambda t: t.stride() if t.layout == torch.strided else None,
    "storage_offset": lambda t: t.storage_offset() if t.layout == torch.strided else None,
    "version": lambda t: None if t.is_inference() else t._version,
    "requires_grad": lambda t: t.requires_grad,
    "is_leaf": lambda t: t.is_leaf,
    "is_parameter": lambda t: isinstance(t, torch.nn.Parameter),
    "grad_fn": lambda t: type(t.grad_fn).__name__,
    "grad": _gradient,
    "is_view": lambda t: t._is_view(),
    "conj, neg": lambda t: (t.is_conj(), t.is_neg()),
}


def _is_own(name: str, given: frozenset[str]) -> bool:
    return name not in given and not name.startswith("__")


def _parts(held: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(held, dict):
        for name, value in held.items():
            yield from _parts(value, f"{place}[{name!r}]" if place else str(name))
    elif isinstance(held, (list, tuple)) and not isinstance(held, torch.Size):
        for number, value in enumerate(held):
            yield from _parts(value, f"{place}[{number}]")
    elif isinstance(held, torch.optim.Optimizer):
        yield from _parts(held.state_dict()["state"], f"{place}.state")
    elif isinstance(held, torch.nn.Module):
        yield from _parts(dict(held.named_parameters()) | dict(held.named_buffers()), place)
    else:
        yield place, held


@attrs.frozen(eq=False)
class Raised:
    """An exception of a statement: its narrowest type in `KINDS`, and its text.

    Two exceptions are equal if their types and texts are equal. Texts are ignored if Djinn raised one of them (`own`).
    """

    kind: str
    text: str
    own: bool = False

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Raised) and self.kind == other.kind and (self.own or other.own or self.text == other.text)
        )

    def __hash__(self) -> int:
        return hash(self.kind)

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


def _raised(error: Exception) -> Raised:
    kind = next(kind.__name__ for kind in KINDS if isinstance(error, kind))
    own = type(error).__module__.partition(".")[0] in {"djinn", "djinn_core", "djinn_client", "djinn_server"}
    text = re.sub(r"remote_accelerator(:\d+)?", "cpu", str(error)).partition("\nException raised from")[0]
    return Raised(kind, text, own)


def _fetched(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copy tensors to the CPU in one round trip, contiguous, with conj and neg bits resolved."""
    with torch.no_grad():
        copies = [t.detach().to("cpu", non_blocking=True) for t in tensors]
        if any(t.device.type != "cpu" for t in tensors):
            djinn.synchronize()
        return [t.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format) for t in copies]


def run(statements: Sequence[str], device: str, extra: Names | None = None) -> list[Facts]:
    """Run a program. Return the facts after each statement and at the end."""
    runner = Runner(device, extra)
    torch.manual_seed(0)
    with runner.listening():
        facts = [runner.step(statement) for statement in statements]
        facts.append(runner.finish())
    return facts


def forget() -> None:
    """Clear the caches of shape inference, so that the next run of a program is like its first."""
    forget_learnt_calls()
