"""The one hierarchy of errors.

Every error that Djinn raises on purpose derives from `DjinnError`. Its message says what happened, to which op, plugin
or server, and what to do next.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

E = TypeVar("E", bound="type[DjinnError]")


def public(code: str) -> Callable[[E], E]:
    """Class decorator: users import the error from `djinn.errors`, so that is what it prints as.

    `code` is its name in docs/errors.md and for `djinn explain-error`; it stays when the class is renamed.
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
        code: stable name of its kind: `djinn explain-error CODE` shows causes and cures.
    """

    code: ClassVar[str]
    tells_of_op: ClassVar[bool] = False  # stands for an exception of PyTorch's own, which needs no note

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        if not self.tells_of_op:
            self.add_note(
                f"`djinn explain-error {self.code}` shows causes and cures"
            )  # in tracebacks, not in the message

    def __reduce__(self) -> Any:
        # By the module of the class. Where `djinn` was not imported, as in a process that holds an executor, cloudpickle would send a copy of the class.
        if globals().get(type(self).__name__) is type(self):
            return _unpickled, (type(self).__name__, self.args), self.__dict__
        return super().__reduce__()


def _unpickled(name: str, arguments: tuple[Any, ...]) -> DjinnError:
    """An error of this module; `pickle` gives it its attributes then."""
    error_type = globals()[name]
    if not (isinstance(error_type, type) and issubclass(error_type, DjinnError)):
        raise TypeError(f"{name} is no error of Djinn")
    return error_type(*arguments)


@public("configuration")
class ConfigurationError(DjinnError, ValueError):
    """A setting is unknown, malformed or contradicts another."""


@public("plugin")
class PluginError(DjinnError):
    """A plugin cannot be found, loaded, registered or used."""


@public("unsupported-op")
class UnsupportedOperation(DjinnError, NotImplementedError):  # noqa: N818 - named after the builtin it refines
    """An op that the remote device cannot run, or that the allow-list excludes."""


@public("invalid-stage")
class InvalidStage(DjinnError):  # noqa: N818 - says what the value is
    """A stage of the pipeline produced a result that breaks an invariant."""


@public("does-not-fit")
class DoesNotFit(InvalidStage):
    """A program takes more memory than devices have room for, or dtypes or ops that they lack; the message says where and how much.

    Attributes:
        pinned: whether other devices would do, but the user named these.
    """

    pinned = False


@public("protocol")
class ProtocolError(DjinnError):
    """Bytes or messages that do not follow the wire format."""


@public("transport")
class TransportError(DjinnError, ConnectionError):
    """A connection could not be made or broke."""


@public("server-busy")
class ServerBusy(TransportError):  # noqa: N818 - says what is so
    """The server has no room for now. Nothing was begun, so that asking again is safe.

    Attributes:
        after: seconds after which that makes sense.
    """

    def __init__(self, message: str, after: float = 0.0) -> None:
        super().__init__(message)
        self.after = after


@public("access-refused")
class AccessRefused(DjinnError, PermissionError):  # noqa: N818 - says what happened
    """The server did not accept the token, the ticket or the version.

    Attributes:
        crashes_executors: whether it was about a session that kills every executor that goes on with it.
    """

    crashes_executors = False


@public("session-lost")
class SessionLost(DjinnError, ConnectionError):  # noqa: N818 - the state that it names is what the user must know
    """The remote state is gone: the executor died or the lease ran out."""


@public("forked-process")
class ForkedProcess(SessionLost, RuntimeError):  # noqa: N818 - says where it is
    """This process was forked from one that used the device."""

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
    """A wait timed out. The session lives on; work that is not needed any more is stopped."""


@public("quota-exceeded")
class QuotaExceeded(DjinnError):  # noqa: N818 - says what happened
    """A tenant has used up what it may use of a server."""


@public("startup")
class StartupError(DjinnError, RuntimeError):
    """A server, an executor or the embedded default did not start."""


@public("weights-unavailable")
class WeightsUnavailable(DjinnError):  # noqa: N818 - says what is so
    """Weights that the server was to read are not there, may not be read, or are malformed."""


@public("remote-op")
class RemoteError(DjinnError, RuntimeError):
    """An op failed on the executor.

    Attributes:
        op: overload name of the op that failed, such as `aten::index.Tensor`.
        site: `file:line` of the user's code that issued it, or an empty string.
        module_path: names of the modules inside which it was issued, such as `transformer.h.3.attn`, or an empty string.
        words: message of the exception on the executor, which `str()` shows with op and line.
    """

    tells_of_op = True

    def __init__(self, message: str, op: str = "", site: str = "", module_path: str = "", words: str = "") -> None:
        super().__init__(message)
        self.words = words
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
    """The executor's PyTorch has no kernel for an op, or the op returns what a remote device does not have."""


@public("remote-out-of-memory")
class RemoteOutOfMemory(RemoteError, MemoryError):  # noqa: N818 - follows torch.OutOfMemoryError
    """The executor's device had no memory left for an op."""

    tells_of_op = False


@public("program-stopped")
class ProgramStopped(RemoteError):  # noqa: N818 - says what happened
    """A value that was not computed, or not written, because its program was stopped at a deadline."""

    tells_of_op = False


@public("verification")
class VerificationError(DjinnError, AssertionError):
    """An op gave other results on the remote device than here; the message names the first."""
