"""How matchers say what they look for: a small language over ops, and subgraphs in networkx where a tree is not enough."""
