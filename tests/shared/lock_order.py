"""Records in which order threads take the locks of Djinn. A cycle in that order is a deadlock that waits for its moment.

`install()` wraps the locks that Djinn has made, and makes from then on. `cycles()` describes each cycle that was seen, with the
stacks at which its locks were taken. As a plugin of pytest it looks at tests: `pytest -p lock_order tests/pool`.
"""

from __future__ import annotations

import sys
import threading
import traceback
from pathlib import Path

import networkx as nx

ROOT = Path(__file__).parents[2]
OURS = tuple(str(ROOT / name) for name in ("djinn", "djinn_core", "plugins"))
KINDS = type(threading.Lock()), type(threading.RLock())
_own = threading.Lock()  # the recorder's own, made before locks are wrapped
_held = threading.local()
_edges: dict[tuple[str, str], str] = {}


class RecordedLock:
    """A lock, and the name of the place that made it. Locks that one line makes share a name."""

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

    def __getattr__(self, name):  # what conditions call
        return getattr(self._lock, name)


def _made_by(make):
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
    """Wrap the locks of modules and of their objects, and have others wrapped when they are made."""
    from djinn_core import interrupts
    from djinn_core.interception.recording import recorder
    from djinn_core.runtime import client, executor_link

    made = _made_by(interrupts.InterruptibleLock)
    for module in (interrupts, recorder, executor_link):
        module.InterruptibleLock = made
    threading.Lock, threading.RLock = _made_by(threading.Lock), _made_by(threading.RLock)
    recorder.recorders._make_locks()
    for owner in [client.context, *[m for name, m in sys.modules.items() if name.startswith(("djinn", "djinn_core"))]]:
        for name in (*getattr(owner, "__dict__", ()), *getattr(owner, "__struct_fields__", ())):
            lock = getattr(owner, name)
            if isinstance(lock, KINDS):
                setattr(owner, name, RecordedLock(lock, f"{getattr(owner, '__name__', 'client.context')}.{name}"))


def edges():
    """The pairs of locks of which the second was taken while the first was held."""
    with _own:
        return dict(_edges)


def cycles():
    """Each cycle of locks, as text."""
    found = edges()
    texts = []
    for cycle in nx.simple_cycles(nx.DiGraph(found), length_bound=4):
        steps = zip(cycle, [*cycle[1:], cycle[0]], strict=True)
        texts.append(" -> ".join([*cycle, cycle[0]]) + "\n" + "\n".join(found[step] for step in steps))
    return texts


def pytest_sessionstart():
    """Wrap them before tests run."""
    import djinn  # noqa: F401 - registers the device

    install()


def pytest_terminal_summary(terminalreporter):
    """Show the order, and what breaks it."""
    for first, second in sorted(edges()):
        terminalreporter.write_line(f"{first} -> {second}")
    for text in cycles():
        terminalreporter.section("cycle of locks")
        terminalreporter.write_line(text)
