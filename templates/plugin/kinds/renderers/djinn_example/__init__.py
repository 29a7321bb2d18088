"""A renderer for Djinn: write the ops of a program as comma-separated values."""

from __future__ import annotations

import csv
import io

from djinn.hooks import Renderer, hookimpl
from djinn.planning import PipelineResult

djinn_api_version = "2.0"


class ExampleRenderer(Renderer):
    """Write a line for each op: its number, its name, and its device."""

    name = "example"
    suffixes = (".example",)
    media_type = "text/csv"

    def render(self, result: PipelineResult) -> str:
        """Return the whole table. Results of stages that did not run are None."""
        decisions = result.placement.decisions if result.placement is not None else ()
        devices = {decision.node: decision.device for decision in decisions}
        rows = ((node.id, node.op, devices.get(node.id, "")) for node in result.graph.nodes)
        table = io.StringIO()
        csv.writer(table).writerows([("node", "op", "device"), *rows])
        return table.getvalue()


@hookimpl
def djinn_register_renderers() -> list[Renderer]:
    """Return the renderers of this plugin."""
    return [ExampleRenderer()]
