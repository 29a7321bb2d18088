"""Switch for recording graphs in one step: on while the plugin is in use. Otherwise graphs run op by op."""

from __future__ import annotations


class _Switch:
    on = False


recording = _Switch()
