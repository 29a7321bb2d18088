"""The suite for integrations."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

import pytest

from djinn.testing.suite import Ending, missing, require_protocol
from djinn_core.hookspecs.integrations import Integration


class IntegrationConformance(Ending):
    """Subclass it and give the fixture `integration`.

    What the library does afterwards is for tests of your own, which need the library and change it for the whole process.
    """

    @pytest.fixture
    def integration(self) -> Integration:
        """The integration."""
        return missing(self, "integration", "your integration")  # type: ignore[return-value]

    def test_it_is_an_integration(self, integration: Integration) -> None:
        """It has every member."""
        require_protocol(integration, "integrations")

    def test_its_module_exists(self, integration: Integration) -> None:
        """The library that is installed has the module that is waited for."""
        library = integration.module.partition(".")[0]
        if importlib.util.find_spec(library) is None:
            pytest.skip(f"{library} is not installed")
        found = integration.module in sys.modules or importlib.util.find_spec(integration.module)
        assert found, f"{library} has no module {integration.module}: the integration would wait for ever"

    def test_a_version_that_is_laid_out_otherwise_is_an_exception_at_most(self, integration: Integration) -> None:
        """A module that has nothing of what it changes: `adapt` leaves it alone or raises an `Exception`."""
        module = ModuleType(integration.module)
        try:
            integration.adapt(module)
        except Exception as error:
            # What was done before the exception stays: look for everything first, and change it then.
            changed = {name for name in vars(module) if not name.startswith("__")}
            assert not changed, f"it raised {error!r} after it had set {sorted(changed)}"
