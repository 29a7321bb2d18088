"""A second implementation of `Interception`: a dispatch mode and a tensor subclass, in Python and without the native library.

It shows that interception can be replaced by a plugin. It records one program for all threads, infers results with meta kernels and
computes here what these cannot infer.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode

from djinn_client.hookspecs.interception import Interception
from djinn_client.sink import Sink, Submission
from djinn_core.hookspecs import hookimpl
from djinn_core.ir import form as forms
from djinn_core.ir.handles import make_handle, new_storage
from djinn_core.ir.program import Call, Program, Signature
from djinn_core.ir.values import TensorMeta, meta_of

djinn_api_version = "2.0"
DEVICE = "remote_accelerator"
aten = torch.ops.aten


class Storage:
    """Memory on the executor that one or more values share."""

    def __init__(self, nbytes: int) -> None:
        self.id, self.nbytes, self.views = new_storage(), nbytes, 0


class Value:
    """A value on the executor. It is freed with the last tensor that refers to it."""

    def __init__(self, device: ModeDevice, storage: Storage, meta: TensorMeta) -> None:
        self.storage, self.meta, self.handle = storage, meta, make_handle(storage.id, storage.views)
        self._freed = device.freed
        storage.views += 1

    def __del__(self) -> None:
        self._freed.append(self.handle)


class ModeTensor(torch.Tensor):
    """A tensor on the executor."""

    value: Value
    device_of_ops: ModeDevice

    @staticmethod
    def of(device: ModeDevice, value: Value) -> ModeTensor:
        meta = value.meta
        made = torch.Tensor._make_wrapper_subclass(
            ModeTensor, meta.shape, meta.stride, meta.offset, dtype=meta.dtype, device=torch.device(DEVICE, 0)
        )
        made.value, made.device_of_ops = value, device
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        (first, *_) = [one for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, ModeTensor)]
        return first.device_of_ops.dispatch(func, args, kwargs or {})

    def __repr__(self, **_: Any) -> str:
        with torch.utils._python_dispatch._disable_current_modes():
            return repr(self.device_of_ops.fetch(self))


class Factories(TorchDispatchMode):
    """A mode that sees ops without tensors of the device, such as factory functions."""

    def __init__(self, device: ModeDevice) -> None:
        super().__init__()
        self.device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.device.dispatch(func, args, kwargs or {})


def is_remote(device: object) -> bool:
    return isinstance(device, torch.device) and device.type == DEVICE


class ModeDevice(Interception):
    """Records ops under a dispatch mode."""

    name = "mode"

    def __init__(self) -> None:
        self.freed: list[int] = []
        self._lock = threading.RLock()
        self._entries: list[tuple[Call, tuple[int, ...], tuple[float, ...]]] = []
        self._signatures: dict[Any, Signature] = {}
        self._mode: Factories | None = None

    def begin(self, sink: Sink) -> None:
        super().begin(sink)
        if self._mode is None:
            backend_registration._setup_privateuseone_for_python_backend(DEVICE)
            torch._C._set_only_lift_cpu_tensors(True)  # `torch.tensor(..., device=...)` makes one here and copies it
            self._mode = Factories(self)
            self._mode.__enter__()

    def take(self, thread: int | None = None) -> list[Submission]:
        with self._lock:
            entries, self._entries = self._entries, []
            freed = [self.freed.pop() for _ in range(len(self.freed))]
        operands = tuple(handle for _, handles, _ in entries for handle in handles)
        dead = frozenset(freed).intersection(operands)
        calls = tuple(call for call, _, _ in entries)
        program = Program(calls, operands, tuple(slot for _, _, slots in entries for slot in slots), dead)
        return [Submission(program, tuple(handle for handle in freed if handle not in dead))]

    def forget(self) -> None:
        self.take()

    def fetch(self, tensor: ModeTensor) -> torch.Tensor:
        """Return the elements of a tensor on the CPU, in one round trip."""
        (reply,) = self.run(fetch=(tensor.value.handle,)).tensors
        return reply

    # --- ops ---------------------------------------------------------------------------------------------------

    def dispatch(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Record an op of the device. Run any other op in this process."""
        leaves = pytree.tree_leaves((args, kwargs))
        remote = [one for one in leaves if isinstance(one, ModeTensor)]
        target = kwargs.get("device")
        if not remote and not is_remote(target):
            return func(*args, **kwargs)
        if func is aten._local_scalar_dense.default:
            return self.fetch(remote[0]).item()
        if func is aten._to_copy.default and (not remote or not is_remote(target or remote[0].device)):
            return self._copy_across(args[0], kwargs)
        if func is aten.copy_.default and not isinstance(args[0], ModeTensor):
            return args[0].copy_(self.fetch(args[1]))
        if func._can_decompose() and func is not aten._to_copy.default:
            with self._mode or Factories(self):
                made = func.decompose(*args, **kwargs)
            if made is not NotImplemented:
                return made
        args, kwargs = pytree.tree_map_only(torch.Tensor, self._uploaded, (args, kwargs))
        try:
            return self._record(func, args, kwargs)
        except NotImplementedError:  # its results depend on data
            here = pytree.tree_map_only(ModeTensor, self.fetch, (args, kwargs))
            return pytree.tree_map_only(torch.Tensor, self.upload, func(*here[0], **here[1]))

    def _copy_across(self, source: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
        dtype = kwargs.get("dtype") or source.dtype
        if isinstance(source, ModeTensor):
            return self.fetch(source).to(dtype)
        return self.upload(source.to(dtype))

    def _uploaded(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if isinstance(tensor, ModeTensor) or tensor.dim() == 0 else self.upload(tensor)

    def upload(self, source: torch.Tensor) -> ModeTensor:
        """Return a copy of a CPU tensor on the executor."""
        source = source.detach().contiguous()
        value = Value(self, Storage(source.nbytes), meta_of(source))
        self.sink.upload(value.handle, source)
        return ModeTensor.of(self, value)

    def _record(self, func: Any, args: Any, kwargs: Any) -> Any:
        operands: list[ModeTensor] = []
        slots: list[float] = []
        encoded = tuple(self._encode(one, operands, slots) for one in args)
        named = tuple((n, self._encode(one, operands, slots)) for n, one in kwargs.items() if n != "pin_memory")
        stand_ins = _MetaOperands()
        metas = [stand_ins.of(one) for one in operands]
        given = iter(metas)
        meta_args, meta_kwargs = pytree.tree_map(
            lambda one: next(given) if isinstance(one, ModeTensor) else torch.device("meta") if is_remote(one) else one,
            (args, kwargs),
        )
        out = func(*meta_args, **meta_kwargs)
        results = list(out) if isinstance(out, (list, tuple)) else [out]
        if any(one is not None and not isinstance(one, torch.Tensor) for one in results):
            raise NotImplementedError
        same = tuple(next((i for i, meta in enumerate(metas) if meta is one), -1) for one in results)
        aliases = tuple(stand_ins.place_of(one, metas) for one in results)
        new = [one is not None and i < 0 for one, i in zip(results, same, strict=True)]
        kinds = tuple("new" if one else "none" for one in new)
        form = forms.Form(func.name(), encoded, named, kinds, isinstance(out, (list, tuple)))
        before = tuple(one.value.meta for one in operands)
        key = form, tuple(meta.tensor_class for meta in before)
        call = Call(
            self._signatures.setdefault(key, Signature(*key)),
            before,
            tuple(None if one is None else meta_of(one) for one in results),
            aliases,
            same,
            tuple(sorted(_written_operands(func, args, kwargs, operands))),
            torch.Tag.nondeterministic_seeded in func.tags,
            form.operand_count,
            form.slot_count,
            form.new_count,
            nbytes=tuple(0 if one is None else one.untyped_storage().nbytes() for one in results),
        )
        return self._append(call, operands, tuple(slots), new)

    def _append(self, call: Call, operands: list[ModeTensor], slots: tuple[float, ...], new: list[bool]) -> Any:
        made: list[Any] = []
        for (meta, alias, same, nbytes), is_new in zip(call.outcome, new, strict=True):
            if not is_new or meta is None:
                made.append(operands[same] if same >= 0 else None)
                continue
            storage = operands[alias].value.storage if alias >= 0 else Storage(nbytes)
            made.append(ModeTensor.of(self, Value(self, storage, meta)))
        fresh = [one.value.handle for one, is_new in zip(made, new, strict=True) if is_new]
        with self._lock:
            self._entries.append((call, (*[one.value.handle for one in operands], *fresh), slots))
        if len(self._entries) >= self.sink.facts.checkpoint_instructions:
            self.send()
        return made if call.sequence else made[0]

    def _encode(self, one: Any, operands: list[ModeTensor], slots: list[float]) -> forms.Argument:
        if isinstance(one, ModeTensor):
            operands.append(one)
            return forms.Operand()
        if isinstance(one, (list, tuple)):
            return forms.ListArg(tuple(self._encode(inner, operands, slots) for inner in one))
        if isinstance(one, torch.Tensor):
            slots.append(one.item())
            return forms.ScalarTensor(str(one.dtype).removeprefix("torch."))
        if one is None or isinstance(one, (bool, str)):
            return forms.Constant(one)
        if isinstance(one, (int, float)):
            slots.append(one)
            return forms.SlotArg()
        if isinstance(one, torch.device):
            return forms.SelfDevice(cpu=not is_remote(one))
        kind = {torch.dtype: "dtype", torch.layout: "layout", torch.memory_format: "memory_format"}.get(type(one))
        if kind is None:
            raise NotImplementedError
        return forms.Enumerated(kind, str(one).removeprefix("torch."))


class _MetaOperands:
    """Meta tensors for operands. Operands that share memory have meta tensors that share memory."""

    def __init__(self) -> None:
        self._storages: dict[int, torch.UntypedStorage] = {}

    def of(self, tensor: ModeTensor) -> torch.Tensor:
        value = tensor.value
        if value.storage.id not in self._storages:
            base = torch.empty(value.storage.nbytes, dtype=torch.uint8, device="meta")
            self._storages[value.storage.id] = base.untyped_storage()
        meta, made = value.meta, torch.empty(0, dtype=value.meta.dtype, device="meta")
        return made.set_(self._storages[value.storage.id], meta.offset, meta.shape, meta.stride)

    @staticmethod
    def place_of(result: Any, metas: list[torch.Tensor]) -> int:
        keys = [meta.untyped_storage()._cdata for meta in metas]
        return keys.index(key) if result is not None and (key := result.untyped_storage()._cdata) in keys else -1


def _written_operands(func: Any, args: Any, kwargs: Any, operands: list[ModeTensor]) -> set[int]:
    """Return the indexes of the operands that the schema marks as written."""
    found: set[int] = set()
    for place, argument in enumerate(func._schema.arguments):
        given = args[place] if place < len(args) else kwargs.get(argument.name)
        if argument.alias_info is not None and argument.alias_info.is_write:
            written = [one for one in pytree.tree_leaves(given) if isinstance(one, ModeTensor)]
            found.update(next(i for i, one in enumerate(operands) if one is tensor) for tensor in written)
    return found


@hookimpl
def djinn_register_interception() -> list[Interception]:
    return [ModeDevice()]
