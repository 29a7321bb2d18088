"""The suite for admission policies, and requests to try them on."""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import pytest

from djinn.testing.suite import Ending, missing, outcome, require_protocol, start
from djinn_core.hookspecs.admission_policies import (
    CONNECTION,
    SESSION,
    STAGES,
    SUBMISSION,
    AdmissionDelay,
    AdmissionPolicy,
    AdmissionRefusal,
    AdmissionRequest,
)
from djinn_core.hookspecs.quotas import Quota


def sample_requests() -> dict[str, AdmissionRequest]:
    """Requests by name: of each stage, of a tenant that uses nothing and of one that uses much."""
    alice = AdmissionRequest(CONNECTION, "alice", "1f0c", client="alice@laptop process 7", device="cpu:0")
    busy = attrs.evolve(
        alice,
        tenant="bob",
        quota=Quota(sessions=4, values=1000, seconds_an_hour=60.0),
        sessions=4,
        values=1000,
        memory=1 << 40,
        device_seconds=3600.0,
        queue_seconds=60.0,
    )
    return {
        "a connection": attrs.evolve(alice, peer="10.0.0.1:5000"),
        "a connection of a monitor": AdmissionRequest(CONNECTION, "prometheus", monitor=True),
        "the operator": AdmissionRequest(CONNECTION, "default"),
        "a session": attrs.evolve(alice, stage=SESSION),
        "a session of a busy tenant": attrs.evolve(busy, stage=SESSION),
        "a submission": attrs.evolve(alice, stage=SUBMISSION),
        "a submission of a busy tenant": attrs.evolve(busy, stage=SUBMISSION),
    }


class AdmissionPolicyConformance(Ending):
    """Subclass it and give the fixture `policy`."""

    @pytest.fixture
    def policy(self) -> AdmissionPolicy:
        """The admission policy."""
        return missing(self, "policy", "your admission policy")  # type: ignore[return-value]

    @pytest.fixture
    def requests(self) -> Mapping[str, AdmissionRequest]:
        """The requests to try, by name. Override to add your own to `djinn.testing.sample_requests()`."""
        return sample_requests()

    def test_it_is_an_admission_policy(self, policy: AdmissionPolicy) -> None:
        """It has every member, and is asked about something."""
        require_protocol(policy, "admission_policies")
        unknown = policy.stages - STAGES
        assert policy.stages, f"`stages` is empty: it is never asked; there are {', '.join(sorted(STAGES))}"
        assert not unknown, f"there are no stages {sorted(unknown)}, but {', '.join(sorted(STAGES))}"

    def test_it_decides_about_each_request(
        self, policy: AdmissionPolicy, requests: Mapping[str, AdmissionRequest]
    ) -> None:
        """None, a refusal that says why, or a delay of some seconds."""
        for name, request in requests.items():
            if request.stage not in policy.stages:
                continue
            result = policy.decide(request)
            assert result is None or isinstance(result, (AdmissionRefusal, AdmissionDelay)), f"{name}: {result!r}"
            if result is not None:
                assert result.reason, f"{name}: a refusal or delay says why"
            if isinstance(result, AdmissionDelay):
                assert result.seconds > 0, f"{name}: a delay of {result.seconds} s"
            if isinstance(result, AdmissionRefusal):
                assert result.after is None or result.after >= 0, f"{name}: `after` is {result.after}"

    def test_it_may_be_called_from_threads(
        self, policy: AdmissionPolicy, requests: Mapping[str, AdmissionRequest]
    ) -> None:
        """Several at the same time: each client has its own."""
        asked = [request for request in requests.values() if request.stage in policy.stages]
        for call in [start(policy.decide, request) for request in asked for _ in range(20)]:
            outcome(call, "`decide` must not wait: it returns a delay")
