"""Matching language for patterns: a small language over ops, and subgraphs in networkx where a tree is not enough."""
