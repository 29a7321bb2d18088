"""A name for the module `djinn`: `djinn.example(...)` counts the ops of a block."""

from __future__ import annotations

from djinn.hooks import ApiName, hookimpl

djinn_api_version = "2.0"


@hookimpl
def djinn_register_api_names() -> list[ApiName]:
    """The names that this plugin adds; their modules are imported when a program asks for one."""
    return [ApiName("example", "djinn_example.block")]
