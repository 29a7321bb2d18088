"""The suite for server observers."""

from __future__ import annotations

import time
from typing import Any

import pytest

from djinn.testing.suite import Ending, missing, require_protocol
from djinn_core.hookspecs.server_observers import ServerEvent, ServerObserver

_TENANT = {"tenant": "alice", "key": "1f0c", "client": "alice@laptop process 7"}
EVENTS: dict[str, dict[str, Any]] = {
    "started": {"urls": ["tcp://127.0.0.1:5556"], "process": 7},
    "connected": {"peer": "127.0.0.1:40000"},
    "admitted": _TENANT | {"peer": "127.0.0.1:40000", "device": "cpu:0", "executor": 8},
    "refused": {"why": "token", "asked": "Hello", "peer": "127.0.0.1:40000"},
    "executor_died": {"process": 8, "exit_status": -9, "device": "cpu:0", "tenant": "alice"},
    "session_began": _TENANT | {"session": "q3f", "device": "cpu:0", "recovered": False},
    "completed": _TENANT | {"session": "q3f", "submission": 3, "failures": 0, "queue": 0.001, "duration": 0.02},
    "transferred": _TENANT
    | {"session": "q3f", "transfer": 2, "source": 1, "bytes": 4096, "duration": 0.001, "error": ""},
    "session_ended": _TENANT | {"session": "q3f", "device": "cpu:0", "duration": 61.5},
    "stopped": {"process": 7},
    "one_of_a_later_version": {"unheard_of": None},
}


class ServerObserverConformance(Ending):
    """Subclass it and give the fixture `observer`."""

    @pytest.fixture
    def observer(self) -> ServerObserver:
        """The observer."""
        return missing(self, "observer", "your server observer")  # type: ignore[return-value]

    def test_it_is_a_server_observer(self, observer: ServerObserver) -> None:
        """It has every member."""
        require_protocol(observer, "server_observers")

    @pytest.mark.parametrize("name", EVENTS)
    def test_it_takes_every_event(self, observer: ServerObserver, name: str) -> None:
        """Also one that it does not know, with facts and without, of either process."""
        for process in ("gateway", "executor"):
            observer.observe(ServerEvent(name, time.time(), process, EVENTS[name]))
            observer.observe(ServerEvent(name, time.time(), process))
