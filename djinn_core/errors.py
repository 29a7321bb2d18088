"""The hierarchy of errors, and the words of messages about missing packages.

Every error that Djinn raises on purpose derives from `DjinnError`. Its message says what happened, to which op, plugin
or server, and what to do next.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

E = TypeVar("E", bound="type[DjinnError]")


def install_hint(folder: str) -> str:
    """Return the commands that install a package of Djinn, from a checkout or from a folder of wheels, for an error message.

    `folder`: the package's folder in a checkout, such as `plugins/ray`.
    """
    wheel = folder.replace("plugins/", "djinn_")
    return f"`pip install ./{folder}` in a checkout of Djinn, or `pip install FOLDER/{wheel}-*.whl` from a FOLDER of its wheels"


def public(code: str) -> Callable[[E], E]:
    """Make an error class public: tracebacks print it as `djinn.errors.NAME`, where users import it from.

    `code` names the error in docs/errors.md and for `djinn explain-error`. The code stays when the class is renamed.
    """

    def decorate(error: E) -> E:
        error.__module__ = "djinn.errors"
        error.code = code
        return error

    return decorate


@public("djinn")
class DjinnError(Exception):
    """Base of every error that Djinn raises on purpose.

    Attributes:
        code: stable name of the kind of error. `djinn explain-error CODE` shows causes and cures.
    """

    code: ClassVar[str]
    is_op_error: ClassVar[bool] = False  # True if the error stands for PyTorch's own exception, which gets no note

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        if not self.is_op_error:
            self.add_note(
                f"`djinn explain-error {self.code}` shows causes and cures"
            )  # a note appears in tracebacks, not in the message

    def __reduce__(self) -> Any:
        # Pickle by name if this module is the class's home: otherwise cloudpickle sends a copy of the class to
        # processes without `djinn`.
        if globals().get(type(self).__name__) is type(self):
            return _unpickle, (type(self).__name__, self.args), self.__dict__
        return super().__reduce__()


def _unpickle(name: str, arguments: tuple[Any, ...]) -> DjinnError:
    """Return an error of this module, created by its class name. `pickle` then restores its attributes."""
    error_type = globals()[name]
    if not (isinstance(error_type, type) and issubclass(error_type, DjinnError)):
        raise TypeError(f"Djinn has no error class {name}")
    return error_type(*arguments)


@public("configuration")
class ConfigurationError(DjinnError, ValueError):
    """A setting is unknown, malformed or contradicts another."""


@public("plugin")
class PluginError(DjinnError):
    """A plugin cannot be found, loaded, registered or used."""


@public("unsupported-op")
class UnsupportedOperation(DjinnError, NotImplementedError):  # noqa: N818 - named after the builtin it refines
    """The remote device cannot run this op, or the allow-list excludes it."""


@public("invalid-stage")
class InvalidStage(DjinnError):  # noqa: N818 - says what the value is
    """A stage of the pipeline produced a result that breaks an invariant."""


@public("does-not-fit")
class DoesNotFit(InvalidStage):
    """A program needs more memory than the devices have, or dtypes or ops that the devices lack.

    Attributes:
        excluded_by_pins: True if other devices could run the program, but the user's `pins` exclude them.
    """

    excluded_by_pins = False


@public("protocol")
class ProtocolError(DjinnError):
    """A message violates the wire format."""


@public("transport")
class TransportError(DjinnError, ConnectionError):
    """A connection failed or could not be made."""


@public("server-busy")
class ServerBusy(TransportError):  # noqa: N818 - says what is so
    """The server is full at present. It has started nothing, so a retry is safe.

    Attributes:
        after: seconds to wait before a retry.
    """

    def __init__(self, message: str, after: float = 0.0) -> None:
        super().__init__(message)
        self.after = after


@public("access-refused")
class AccessRefused(DjinnError, PermissionError):  # noqa: N818 - says what happened
    """The server rejected the token, the ticket or the version.

    Attributes:
        crashes_executors: True if the server refuses the session because its executors crash each time it resumes.
    """

    crashes_executors = False


@public("session-lost")
class SessionLost(DjinnError, ConnectionError):  # noqa: N818 - the state that it names is what the user must know
    """The remote state is lost: the executor died or the lease expired."""


@public("forked-process")
class ForkedProcess(SessionLost, RuntimeError):  # noqa: N818 - says where it is
    """This process was forked from a process that used the device."""

    def __init__(
        self,
        message: str = (
            "Cannot use remote_accelerator in this process: it was forked from one that used it, whose session stays with "
            "the parent. To use the device with multiprocessing, start processes with 'spawn' or 'forkserver'"
        ),
    ) -> None:
        super().__init__(message)


@public("deadline-exceeded")
class DeadlineExceeded(DjinnError, TimeoutError):  # noqa: N818 - says what happened
    """A wait timed out. The session continues. Work that is no longer needed is cancelled."""


@public("quota-exceeded")
class QuotaExceeded(DjinnError):  # noqa: N818 - says what happened
    """A tenant has reached its quota on a server."""


@public("startup")
class StartupError(DjinnError, RuntimeError):
    """A server, an executor or the embedded default did not start."""


@public("weights-unavailable")
class WeightsUnavailable(DjinnError):  # noqa: N818 - says what is so
    """The server cannot read the requested weights: they are missing, forbidden or malformed."""


@public("remote-op")
class RemoteError(DjinnError, RuntimeError):
    """An op failed on the executor.

    Attributes:
        op: overload name of the op that failed, such as `aten::index.Tensor`.
        site: `file:line` of the user's code that issued the op, or an empty string.
        module_path: path of the innermost module that issued the op, such as `transformer.h.3.attn`, or an empty
            string.
        remote_message: message of the exception on the executor. `str()` shows this message with the op and the line.
    """

    is_op_error = True

    def __init__(
        self, message: str, op: str = "", site: str = "", module_path: str = "", remote_message: str = ""
    ) -> None:
        super().__init__(message)
        self.remote_message = remote_message
        self.op = op
        self.site = site
        self.module_path = module_path


@public("remote-index")
class RemoteIndexError(RemoteError, IndexError):
    """An op failed on the executor with an `IndexError`."""


@public("remote-value")
class RemoteValueError(RemoteError, ValueError):
    """An op failed on the executor with a `ValueError`."""


@public("remote-type")
class RemoteTypeError(RemoteError, TypeError):
    """An op failed on the executor with a `TypeError`."""


@public("remote-not-implemented")
class RemoteNotImplementedError(RemoteError, UnsupportedOperation):
    """The executor's PyTorch has no kernel for an op, or the remote device does not support the result's type."""


@public("remote-out-of-memory")
class RemoteOutOfMemory(RemoteError, MemoryError):  # noqa: N818 - follows torch.OutOfMemoryError
    """The executor's device ran out of memory in an op."""

    is_op_error = False


@public("program-stopped")
class ProgramStopped(RemoteError):  # noqa: N818 - says what happened
    """A value does not exist, because its program was stopped at a deadline."""

    is_op_error = False


@public("verification")
class VerificationError(DjinnError, AssertionError):
    """An op gave different results on the remote device and on the CPU. The message names the first such op."""
