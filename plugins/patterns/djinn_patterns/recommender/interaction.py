"""The pattern `interaction`: where features of different tables are multiplied with each other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from djinn.hooks import Pattern
from djinn.planning import Gradients, Graph, Node, PatternMatch
from djinn_patterns.recommender.attending import ATTENTION
from djinn_patterns.recommender.feature_interaction import FeatureInteraction
from djinn_patterns.recommender.features import LOOK_UPS, features
from djinn_patterns.recommender.interactions import PLACES, interactions

_WHAT = {
    "dot": "the products of all pairs of features",
    "pairs": "products of pairs of features",
    "factorisation": "the square of a sum of features less the sum of their squares",
    "cross": "features times a layer over them, added to them",
    "mask": "features times a layer over them, as a mask",
    "product": "products of two features",
    "towers": "how alike what two groups of features lead to is",
    "distance": "how far two features are apart",
    "attention": "weighted sums of features, weighted by how alike they are",
}
_LESS_SURE = {"mask": 0.9, "product": 0.92, "pairs": 0.93, "towers": 0.95, "distance": 0.9, "attention": 0.9}


class Interaction(Pattern):
    """Features of a recommender that meet in products: of all pairs, in crosses, factorisation machines, two towers."""

    name = "interaction"
    tolerates_growth = True
    operations = LOOK_UPS | PLACES | ATTENTION

    def match(self, graph: Graph, candidates: Sequence[Node]) -> Iterable[PatternMatch]:
        """One match for each place where features meet; with the look-ups that lead to it."""
        found = features(graph, candidates)
        if found.leads:
            gradients = graph.flow.shared(Gradients)
            for interaction in interactions(graph, found):
                if interaction.at not in gradients:
                    yield _match(graph, interaction)


def _match(graph: Graph, interaction: FeatureInteraction) -> PatternMatch:
    return PatternMatch(
        pattern=Interaction.name,
        nodes=interaction.nodes,
        confidence=_LESS_SURE.get(interaction.kind, 0.97),
        reason=f"node {interaction.at} ({graph.nodes[interaction.at].op}) takes {_WHAT[interaction.kind]}",
        details={"kind": interaction.kind, "tables": interaction.tables},
    )
