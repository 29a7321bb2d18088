"""Conformance suite for integrations."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

import pytest

from djinn.testing.suite import Ending, missing, require_protocol
from djinn_client.hookspecs.integrations import Integration


class IntegrationConformance(Ending):
    """Conformance suite. Subclass it and define the fixture `integration`.

    Test the adapted library in your own tests. They need the library, and change it for the whole process.
    """

    @pytest.fixture
    def integration(self) -> Integration:
        """Return the integration under test."""
        return missing(self, "integration", "your integration")  # type: ignore[return-value]

    def test_it_is_an_integration(self, integration: Integration) -> None:
        """The integration has every member."""
        require_protocol(integration, "integrations")

    def test_its_module_exists(self, integration: Integration) -> None:
        """The installed library has the module that the integration names."""
        library = integration.module.partition(".")[0]
        if importlib.util.find_spec(library) is None:
            pytest.skip(f"{library} is not installed")
        has_module = integration.module in sys.modules or importlib.util.find_spec(integration.module)
        assert has_module, f"{library} has no module {integration.module}: the integration would wait for ever"

    def test_a_version_that_is_laid_out_otherwise_is_an_exception_at_most(self, integration: Integration) -> None:
        """`adapt` leaves a module without the expected names alone, or raises an `Exception`."""
        module = ModuleType(integration.module)
        try:
            integration.adapt(module)
        except Exception as error:
            # Changes before the exception stay, so look up all names before you change anything.
            changed_names = {name for name in vars(module) if not name.startswith("__")}
            assert not changed_names, f"it raised {error!r} after it had set {sorted(changed_names)}"
