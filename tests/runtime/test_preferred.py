"""The policy and the scheduler where none is named: those that say so of themselves, and else the built-in ones."""

from __future__ import annotations

from types import SimpleNamespace

from djinn_client.runtime.planning.constraints import policy_for
from djinn_core.planning.request import preferred
from djinn_core.settings import Settings


def offered_plugins(**preferences):
    return [SimpleNamespace(name=name, preference=rank) for name, rank in preferences.items()]


def test_highest_preference_chooses_policy():
    known = offered_plugins(single=None, zealous=None, second=2, best=3, alike=3)
    assert policy_for(Settings(), known, 2) == "alike"
    assert policy_for(Settings(), known, 1) == "single"
    assert policy_for(Settings(placement_policy="zealous"), known, 2) == "zealous"
    assert policy_for(Settings(), offered_plugins(single=None, zealous=None), 2) == "single"


def test_highest_preference_chooses_scheduler():
    assert preferred(offered_plugins(sequential=None, quick=1, slow=0), "sequential") == "quick"
    assert preferred(offered_plugins(sequential=None, other=None), "sequential") == "sequential"
