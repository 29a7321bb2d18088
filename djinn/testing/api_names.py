"""The suite for names of the module `djinn`."""

from __future__ import annotations

import inspect

import pytest

import djinn
from djinn.testing.suite import Ending, missing, require_protocol
from djinn_core.hookspecs.api_names import ApiName


class ApiNameConformance(Ending):
    """Subclass it and give the fixture `api_name`."""

    @pytest.fixture
    def api_name(self) -> ApiName:
        """The name."""
        return missing(self, "api_name", "a name that your plugin brings")  # type: ignore[return-value]

    def test_it_is_a_name(self, api_name: ApiName) -> None:
        """It can be written after `djinn.`, and is no name of Djinn's own."""
        require_protocol(api_name, "api_names")
        assert api_name.name.isidentifier(), f"{api_name.name!r} cannot be written after `djinn.`"
        assert not api_name.name.startswith("_"), "names that begin with an underscore are never looked for"

    def test_it_is_what_programs_find(self, api_name: ApiName) -> None:
        """`djinn.<name>` is what its module defines; the package has an entry point in the group `djinn.api`."""
        assert getattr(djinn, api_name.name) is api_name.load()

    def test_it_says_what_it_is(self, api_name: ApiName) -> None:
        """It has a docstring."""
        assert inspect.getdoc(api_name.load()), f"`help(djinn.{api_name.name})` says nothing"
