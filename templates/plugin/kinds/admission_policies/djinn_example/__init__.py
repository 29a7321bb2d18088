"""An admission policy for Djinn: no tenant begins a session while its programs hold too much memory."""

from __future__ import annotations

import attrs

from djinn.hooks import AdmissionDelay, AdmissionPolicy, AdmissionRefusal, AdmissionRequest, hookimpl

djinn_api_version = 1


@attrs.frozen
class Settings:
    """Settings of the plugin, as in `[plugins.example]` or DJINN_PLUGIN_EXAMPLE_GIB."""

    gib: float = attrs.field(default=64.0, validator=attrs.validators.gt(0))


djinn_settings = Settings


class ExamplePolicy:
    """Asked in executors, before each session."""

    name = "example"
    stages = frozenset({"session"})

    def __init__(self, settings: Settings) -> None:
        self._gib = settings.gib

    def decide(self, request: AdmissionRequest) -> AdmissionRefusal | AdmissionDelay | None:
        """None if the session may begin."""
        if request.memory <= self._gib * 2**30:
            return None
        return AdmissionRefusal(f"your programs hold more than {self._gib:g} GiB: end one of them", after=10.0)


@hookimpl
def djinn_register_admission_policies(settings: Settings) -> list[AdmissionPolicy]:
    """The admission policies that this plugin offers."""
    return [ExamplePolicy(settings)]
