"""Names of `djinn` that packages bring: found, refused, and where their package is not in use, named with it."""

from __future__ import annotations

from pathlib import Path

import pytest

import djinn
from djinn._lazy_names import importing
from djinn_core.errors import PluginError
from djinn_core.registry.api_names import find_api_name

ROOT = Path(__file__).parents[2]


def test_a_name_of_a_package_is_found_and_kept():
    from djinn_profiler.timeline.profiling import profile

    assert djinn.profile is profile
    assert vars(djinn)["profile"] is profile


def test_a_name_whose_package_is_not_in_use_says_what_to_install(monkeypatch):
    monkeypatch.setenv("DJINN_DISABLE", "timeline")
    assert find_api_name("profile") is None
    find = importing("djinn", {}, {"plugins/profiler": "profile"})
    with pytest.raises(PluginError, match=r"`djinn\.profile` is in a package.*pip install \./plugins/profiler"):
        find("profile")(ops=True)


def test_a_class_whose_package_is_not_in_use_is_a_class(monkeypatch):
    monkeypatch.setenv("DJINN_DISABLE", "timeline")
    missing = importing("djinn", {}, {"plugins/profiler": "Timeline"})("Timeline")
    assert not isinstance(3, missing)
    assert (missing | None).__args__[0] is missing
    with pytest.raises(PluginError, match=r"`djinn\.Timeline` is in a package"):
        missing()


def test_a_package_that_is_installed_while_a_process_runs_is_found(install, site):
    assert not hasattr(djinn, "late_name")
    install(
        "late",
        """
        from djinn.hooks import ApiName, hookimpl
        djinn_api_version = "2.0"
        @hookimpl
        def djinn_register_api_names():
            return [ApiName("late_name", __name__)]
        def late_name():
            return 3
        """,
    )
    assert djinn.late_name() == 3
    del djinn.late_name


def test_other_names_are_attribute_errors():
    with pytest.raises(AttributeError, match=r"'djinn' has no attribute 'no_such_name'"):
        _ = djinn.no_such_name
    assert not hasattr(djinn, "__no_such_name__")


def test_packages_are_where_messages_say():
    for folder, listed in djinn._PACKAGES.items():
        assert (ROOT / folder / "pyproject.toml").exists()
        assert set(listed.split()) <= set(djinn.__all__)
