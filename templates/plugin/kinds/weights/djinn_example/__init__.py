"""A weight source for Djinn: `example:NAME` is a model in a folder of that name, in any folder that the operator permits."""

from __future__ import annotations

from collections.abc import Sequence

from djinn.hooks import WeightFile, WeightPermissions, WeightsUnavailable, WeightSource, hookimpl
from djinn.weights import open_folder

djinn_api_version = 1


class ExampleSource:
    """Opens `example:NAME`. `name` is the scheme."""

    name = "example"

    def open(self, address: str, permissions: WeightPermissions) -> Sequence[WeightFile]:
        """The files with weights of a model."""
        model = address.removeprefix("example:")
        for folder in permissions.folders:
            try:
                permissions.resolve(folder / model)  # before anything else: no client may learn what else is on the disk
            except WeightsUnavailable:
                continue
            return open_folder(folder / model, permissions)
        raise WeightsUnavailable(f"there is no model {model!r}")


@hookimpl
def djinn_register_weight_sources() -> list[WeightSource]:
    """The weight sources that this plugin offers."""
    return [ExampleSource()]
