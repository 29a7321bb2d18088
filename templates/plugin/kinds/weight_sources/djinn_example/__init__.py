"""A weight source for Djinn: `example:NAME` is a model in a folder of this name, inside a folder that the operator permits."""

from collections.abc import Sequence
from pathlib import Path

from djinn.hooks import LocalPlace, WeightSource, hookimpl

djinn_api_version = "2.0"


class ExampleSource(WeightSource):
    """Open `example:NAME`. `name` is the scheme."""

    name = "example"

    def places(self, address: str, folders: Sequence[Path]) -> Sequence[LocalPlace]:
        """Return the model's place in each folder. The executor checks the permissions and opens the first permitted place."""
        return [LocalPlace(folder / address.removeprefix("example:")) for folder in folders]


@hookimpl
def djinn_register_weight_sources() -> list[WeightSource]:
    """Return the weight sources of this plugin."""
    return [ExampleSource()]
