"""Conformance suite for routers."""

from __future__ import annotations

import pytest

from djinn.testing.suite import missing, require_protocol
from djinn_client.hookspecs.routers import Router


class RouterConformance:
    """Tests that every router must pass.

    Subclass this class and define the fixture `router`. The fixture must not have called `begin`.
    """

    @pytest.fixture
    def router(self) -> Router:
        """Return the router under test."""
        return missing(self, "router", "your router")  # type: ignore[return-value]

    def test_router_has_every_member(self, router: Router) -> None:
        """The router has all attributes and methods of `Router`, and a name."""
        require_protocol(router, "routers")
        assert router.name, "`name` is empty, which is the name of the router of one executor"

    def test_router_overrides_route_or_submit(self, router: Router) -> None:
        """The router overrides `route` or `submit`."""
        assert type(router).submit is not Router.submit or type(router).route is not Router.route, (
            "the router overrides neither `route` nor `submit`, so every program would run on the first executor"
        )
