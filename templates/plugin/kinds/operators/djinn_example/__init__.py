"""An operator library for Djinn. `djinn serve --operators example` allows its ops."""

from djinn.hooks import OperatorLibrary, hookimpl

djinn_api_version = "2.0"


class ExampleLibrary(OperatorLibrary):
    """The ops that importing `djinn_example.ops` registers. Clients and servers install this package."""

    name = "example"
    module = "djinn_example.ops"
    operators = frozenset({"example::scaled_sum"})
    package = "the package djinn-example"

    def check(self, op, arguments):
        """Refuse arguments with which a kernel would read beyond a tensor. Clients may be hostile."""
        if arguments["x"].shape != arguments["y"].shape:
            raise ValueError("x and y must have one shape")


@hookimpl
def djinn_register_operators() -> list[OperatorLibrary]:
    """Return the operator libraries of this plugin."""
    return [ExampleLibrary()]
