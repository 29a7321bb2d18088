"""Switch for recording graphs in one step. It is on if the plugin is in use. If it is off, graphs run op by op."""

from __future__ import annotations


class _Switch:
    on = False


recording = _Switch()
