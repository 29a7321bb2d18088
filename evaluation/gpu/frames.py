"""An executor process driven by frames, without Djinn's device and compiler.

A program is a function that changes tensors in place and may return new ones. It runs on tensors of any device.
`record` runs it on meta tensors and makes a template of the dispatched ops.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import attrs
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from djinn_core.hookspecs.transports import Frame, Limits
from djinn_core.ir.form import Argument, Constant, Enumerated, Form, ListArg, Operand, SelfDevice, SlotArg
from djinn_core.ir.handles import make_handle
from djinn_core.protocol.local import LocalTransport
from djinn_core.registry.selection import Selection
from djinn_core.settings import PluginSetting
from djinn_core.wire import messages
from djinn_core.wire.binding_delta import Slot, pack_handles
from djinn_core.wire.message_base import Failure, Message
from djinn_core.wire.templates import digest_of
from djinn_core.wire.tensors import tensor_from_wire, tensor_to_wire
from djinn_core.wire.timing_messages import TimingsRequest
from djinn_core.wire.upload_messages import UploadPart
from djinn_server.launch.executor_config import ExecutorConfig
from djinn_server.launch.process import ExecutorProcess

Step = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor] | None]
SECONDS: Final = 60.0
UPLOAD_BYTES: Final = 4 << 20  # bytes per frame
_COUNTED: Final = "device_synchronizations of ", "device_synchronizations at "
WATCHED: Final = "evaluation.gpu.watched_devices"


@attrs.frozen
class RecordedProgram:
    """A template whose inputs are the program's tensors, in order.

    Attributes:
        slots: numeric arguments of the template. digest: digest of the template.
    """

    template: messages.Template
    slots: tuple[Slot, ...]
    digest: bytes


class _Recorder(TorchDispatchMode):
    def __init__(self, given: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.numbers: dict[tuple[Any, ...], int] = {}
        self.kept: list[torch.Tensor] = []  # keeps storages alive, so that addresses are unique
        self.forms: dict[Form, int] = {}
        self.code: list[int] = []
        self.references: list[int] = []
        self.slots: list[Slot] = []
        for tensor in given:
            self.number(tensor)

    def number(self, tensor: torch.Tensor) -> int:
        """Number a new value."""
        self.kept.append(tensor)
        self.numbers[_identity(tensor)] = len(self.kept) - 1
        return len(self.kept) - 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        operands: list[torch.Tensor] = []
        positional = tuple([self._argument(value, operands) for value in args])
        keywords = tuple([(name, self._argument(value, operands)) for name, value in (kwargs or {}).items()])
        self.references += [self.numbers[_identity(tensor)] for tensor in operands]
        results = result if isinstance(result, (tuple, list)) else () if result is None else (result,)
        new = [isinstance(item, torch.Tensor) and not any(item is operand for operand in operands) for item in results]
        self.references += [self.number(item) for item, outputs in zip(results, new, strict=True) if outputs]
        kinds: Any = tuple(["new" if outputs else "none" for outputs in new])
        form = Form(func.name(), positional, keywords, kinds, isinstance(result, (tuple, list)))
        self.code.append(self.forms.setdefault(form, len(self.forms)))
        return result

    def _argument(self, value: Any, operands: list[torch.Tensor]) -> Argument:
        if isinstance(value, torch.Tensor):
            operands.append(value)
            return Operand()
        if isinstance(value, (list, tuple)):
            return ListArg(tuple([self._argument(item, operands) for item in value]))
        if isinstance(value, torch.device):
            return SelfDevice(value.type == "cpu")
        for kind in ("dtype", "layout", "memory_format"):
            if isinstance(value, getattr(torch, kind)):
                return Enumerated(kind, str(value).removeprefix("torch."))  # type: ignore[arg-type]
        if isinstance(value, (bool, str)) or value is None:
            return Constant(value)
        self.slots.append(value)
        return SlotArg()


def _identity(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return a key of a live tensor. Copies that autograd saved have the same key."""
    place = tensor.untyped_storage()._cdata, tensor.storage_offset()
    return (*place, tuple(tensor.shape), tensor.stride(), tensor.dtype)


def record(step: Step, given: Sequence[torch.Tensor]) -> RecordedProgram:
    """Record a program for tensors like `given`."""
    likes = [torch.empty_like(tensor, device="meta") for tensor in given]
    recorder = _Recorder(likes)
    with recorder:
        returned = step(likes) or ()
    outputs = tuple([recorder.numbers[_identity(tensor)] for tensor in returned])
    template = messages.Template(
        tuple(recorder.forms), tuple(recorder.code), tuple(recorder.references), tuple(range(len(likes))), outputs
    )
    return RecordedProgram(template, tuple(recorder.slots), digest_of(template))


class Client:
    """A session of an executor process. `submit` does not wait. `answer` returns the replies in order."""

    def __init__(self, process: ExecutorProcess) -> None:
        self._connection = LocalTransport().connect(process.ready.urls[0], Limits(), SECONDS)
        self._last_handle = self._submissions = 0
        self._bound: dict[bytes, tuple[Any, ...]] = {}  # slots and inputs of each template's last run
        reply = self._request(messages.Attach(process.issue_ticket("gpu report"), ""))
        assert isinstance(reply, messages.Attached), reply

    def upload(self, tensor: torch.Tensor) -> int:
        """Send a tensor's bytes and return its handle. Ops that are submitted later wait for them."""
        header, data = tensor_to_wire(tensor.contiguous())
        handle = self._new_handle()
        for start in range(0, max(data.nbytes, 1), UPLOAD_BYTES):
            part = UploadPart(handle, header.dtype, header.shape, header.stride, data.nbytes, start)
            self._send(part, [data[start : start + UPLOAD_BYTES]])
        return handle

    def submit(
        self,
        program: RecordedProgram | None = None,
        inputs: Sequence[int] = (),
        fetch: Sequence[int] = (),
        free: Sequence[int] = (),
        *,
        synchronize: bool = False,
    ) -> list[int]:
        """Send a submission and return the handles of the outputs of its program."""
        self._submissions += 1
        more: dict[str, Any] = {}
        outputs: list[int] = []
        if program is not None:
            outputs = [self._new_handle() for _ in program.template.outputs]
            more = {"digest": program.digest, "outputs": pack_handles(outputs)}
            binding = program.slots, pack_handles(inputs)
            if self._bound.get(program.digest) != binding:
                self._bound[program.digest] = binding
                more |= {"first": messages.InitialBindings(*binding), "template": program.template}
        handle_fields = {"fetch": pack_handles(fetch), "free": pack_handles(free)}
        self._send(messages.Submit(self._submissions, synchronize=synchronize, **handle_fields, **more))
        return outputs

    def answer(self) -> tuple[messages.Completed, list[torch.Tensor]]:
        """Return the reply to the oldest open submission, and the fetched tensors.

        Raises:
            AssertionError: an op failed, or a value cannot be fetched.
        """
        reply, body = self._receive()
        assert not (failed := _failure(reply)), failed
        return reply, [tensor_from_wire(header, data) for header, data in zip(reply.results, body, strict=True)]

    def failure(self) -> str:
        """Return the message of the first failure in the reply to the oldest open submission, or ""."""
        return _failure(self._receive()[0])

    def run(
        self, program: RecordedProgram | None = None, inputs: Sequence[int] = (), fetch: Sequence[int] = ()
    ) -> list[torch.Tensor]:
        """Run a program, wait until the device has run it, and return the fetched tensors."""
        self.submit(program, inputs, fetch, synchronize=True)
        return self.answer()[1]

    def time_ops(self) -> None:
        """Have replies report the times of each op."""
        self._request(TimingsRequest(ops=True))

    def figures(self) -> dict[str, int]:
        """Return the executor's figures; those of the device begin with `device_`."""
        reply = self._request(messages.StatsRequest())
        assert isinstance(reply, messages.StatsReply), reply
        return reply.values

    def close(self) -> None:
        """End the session."""
        with contextlib.suppress(Exception):  # the executor may have ended
            self._send(messages.Goodbye())
        self._connection.close()

    def _request(self, message: Message) -> Any:
        self._send(message)
        return self._receive()[0]

    def _send(self, message: Message, body: Sequence[Any] = ()) -> None:
        self._connection.send(Frame(messages.encode(message), body))

    def _receive(self) -> tuple[Any, Sequence[Any]]:
        frame = self._connection.receive(SECONDS)
        return messages.decode(frame.head), frame.body

    def _new_handle(self) -> int:
        self._last_handle += 1
        return make_handle(self._last_handle, 0)


def hidden_synchronizations(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    """Return how often an executor waited for its device, other than for events, between two `figures`, by cause."""
    increases = {name: after[name] - before.get(name, 0) for name in after if name.startswith(_COUNTED)}
    return {name.removeprefix("device_"): n for name, n in increases.items() if n and not name.endswith(" of an event")}


def _failure(reply: Any) -> str:
    assert isinstance(reply, messages.Completed), reply
    return next((item.message for item in (*reply.failures, *reply.results) if isinstance(item, Failure)), "")


def memory_of(device: str) -> int:
    """Return a small limit of accelerator memory for an executor, in bytes, so that it soon runs out."""
    return (6 << 30) if device.startswith("cuda") else (256 << 20)


@contextlib.contextmanager
def executor(device: str, control: str = "", **config: Any) -> Iterator[ExecutorProcess]:
    """Run an executor process with `ExecutorConfig(**config)`, on a counting device.

    `control`: folder for a socket of `fakegpu`, through which `RemoteControl` injects faults.
    """
    plugins = (WATCHED, "fakegpu") if device.startswith("fakegpu") else (WATCHED,)
    settings = {"memory_mib": memory_of(device) >> 20, "control": control}
    inputs = tuple([PluginSetting("fakegpu", name, value, "argument") for name, value in settings.items()])
    selection = Selection(plugins, plugin_settings=inputs if "fakegpu" in plugins else ())
    config = {"threads": 1, "plugins": selection, **config}
    with ExecutorProcess(ExecutorConfig(device.replace("cuda", "watched-cuda"), **config)) as process:
        process.wait_ready(SECONDS)
        yield process


@contextlib.contextmanager
def session(device: str) -> Iterator[Client]:
    """Open a session of a new executor process."""
    with executor(device) as process, contextlib.closing(Client(process)) as client:
        yield client
