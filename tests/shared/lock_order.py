"""Record the order in which threads take Djinn's locks. A cycle in this order is a possible deadlock.

`install()` wraps Djinn's existing and future locks. `cycles()` describes each recorded cycle with the stacks at which its locks were
taken. It is also a pytest plugin: `pytest -p lock_order tests/pool`.
"""

from __future__ import annotations

import sys
import threading
import traceback
from pathlib import Path

import networkx as nx

ROOT = Path(__file__).parents[2]
OURS = tuple(str(ROOT / name) for name in ("djinn", "djinn_core", "djinn_client", "djinn_server", "plugins"))
KINDS = type(threading.Lock()), type(threading.RLock())
_own = threading.Lock()  # the recorder's own, made before locks are wrapped
_held = threading.local()
_edges: dict[tuple[str, str], str] = {}


class RecordedLock:
    """Lock with the source line that created it as its name. Locks of one source line share a name."""

    def __init__(self, lock, name):
        self._lock, self._name = lock, name

    def acquire(self, blocking=True, timeout=-1):
        held = _held.__dict__.setdefault("locks", [])
        if blocking and not any(other is self for other in held):
            self._record(held)
        taken = self._lock.acquire(blocking, timeout)
        if taken:
            held.append(self)
        return taken

    def _record(self, held):
        for other in held:
            edge = other._name, self._name
            if edge not in _edges:
                stack = "".join(traceback.format_stack(sys._getframe(2), limit=14))
                with _own:
                    _edges.setdefault(edge, f"{edge[0]} was held by {threading.current_thread().name} here:\n{stack}")

    def release(self):
        self._lock.release()
        held = _held.__dict__.get("locks", [])
        for position in reversed(range(len(held))):
            if held[position] is self:
                del held[position]
                break

    def __enter__(self):
        return self.acquire()

    def __exit__(self, *error):
        self.release()

    def __getattr__(self, name):  # private methods that `Condition` calls
        return getattr(self._lock, name)


def _locks_named_by(make):
    def made(*arguments):
        frame = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename == threading.__file__:
            frame = frame.f_back  # a condition or an event makes it
        file = frame.f_code.co_filename if frame is not None else ""
        lock = make(*arguments)
        if not file.startswith(OURS) or isinstance(lock, RecordedLock):
            return lock
        return RecordedLock(lock, f"{Path(file).relative_to(ROOT)}:{frame.f_lineno}")

    return made


def install():
    """Wrap existing locks of modules and their objects, and wrap new locks on creation."""
    from djinn_client.interception.recording import recorder
    from djinn_client.interception.runtime_interface import port
    from djinn_client.runtime import client, executor_link
    from djinn_core.system import interrupts

    made = _locks_named_by(interrupts.InterruptibleLock)
    for module in (interrupts, recorder, executor_link):
        module.InterruptibleLock = made
    threading.Lock, threading.RLock = _locks_named_by(threading.Lock), _locks_named_by(threading.RLock)
    for owner in [
        client.context,
        port,
        recorder.recorders,
        *[m for name, m in sys.modules.items() if name.startswith("djinn")],
    ]:
        for name in (*getattr(owner, "__dict__", ()), *getattr(owner, "__struct_fields__", ())):
            lock = getattr(owner, name)
            if isinstance(lock, KINDS):
                setattr(owner, name, RecordedLock(lock, f"{getattr(owner, '__name__', type(owner).__name__)}.{name}"))


def edges():
    """Return pairs of locks (held, taken) with the stack of the first occurrence."""
    with _own:
        return dict(_edges)


def cycles():
    """Return a description of each cycle."""
    found = edges()
    texts = []
    for cycle in nx.simple_cycles(nx.DiGraph(found), length_bound=4):
        steps = zip(cycle, [*cycle[1:], cycle[0]], strict=True)
        texts.append(" -> ".join([*cycle, cycle[0]]) + "\n" + "\n".join(found[step] for step in steps))
    return texts


def pytest_sessionstart():
    """Wrap locks before tests run."""
    import djinn  # noqa: F401 - registers the device

    install()


def pytest_terminal_summary(terminalreporter):
    """Print the lock order and its cycles."""
    for first, second in sorted(edges()):
        terminalreporter.write_line(f"{first} -> {second}")
    for text in cycles():
        terminalreporter.section("cycle of locks")
        terminalreporter.write_line(text)
