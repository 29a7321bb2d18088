"""Conformance suite for integrations."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

import pytest

from djinn.testing.suite import Ending, missing, require_protocol
from djinn_client.hookspecs.integrations import Integration


class IntegrationConformance(Ending):
    """Tests that every integration must pass.

    Subclass this class and define the fixture `integration`. Test the adapted library in your own tests, because an
    integration changes the library for the whole process.
    """

    @pytest.fixture
    def integration(self) -> Integration:
        """Return the integration under test."""
        return missing(self, "integration", "your integration")  # type: ignore[return-value]

    def test_integration_has_every_member(self, integration: Integration) -> None:
        """The integration has all attributes and methods of `Integration`."""
        require_protocol(integration, "integrations")

    def test_adapted_module_exists(self, integration: Integration) -> None:
        """The installed library has the module that the integration adapts."""
        library = integration.module.partition(".")[0]
        if importlib.util.find_spec(library) is None:
            pytest.skip(f"{library} is not installed")
        has_module = integration.module in sys.modules or importlib.util.find_spec(integration.module)
        assert has_module, f"{library} has no module {integration.module}, so `adapt` would never be called"

    def test_unknown_library_versions_are_tolerated(self, integration: Integration) -> None:
        """If the module lacks the expected names, `adapt` leaves it unchanged or raises an `Exception`."""
        module = ModuleType(integration.module)
        try:
            integration.adapt(module)
        except Exception as error:
            # Changes before the exception stay, so look up all names before you change anything.
            changed_names = {name for name in vars(module) if not name.startswith("__")}
            assert not changed_names, f"`adapt` raised {error!r} after it had changed {sorted(changed_names)}"
