"""A pattern for Djinn: recognises a matrix product that is followed by a ReLU."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from djinn.hooks import Graph, Node, Pattern, PatternMatch, hookimpl

djinn_api_version = 1


class ExamplePattern:
    """A matrix product whose only user is a ReLU."""

    name = "example"
    operations = frozenset({"mm", "addmm"})

    def match(self, graph: Graph, candidates: Sequence[Node]) -> Iterable[PatternMatch]:
        """One match for each product that fits. `candidates` are the nodes whose op is in `operations`."""
        for product in candidates:
            users = graph.consumers(product.outputs[0]) if product.outputs else ()
            if len(users) == 1 and users[0].operation in {"relu", "relu_"}:
                yield PatternMatch(
                    pattern=self.name,
                    nodes=(product.id, users[0].id),
                    confidence=0.9,
                    reason=f"{users[0].op} is all that uses the result of {product.op}",
                )


@hookimpl
def djinn_register_patterns() -> list[Pattern]:
    """The patterns that this plugin offers."""
    return [ExamplePattern()]
