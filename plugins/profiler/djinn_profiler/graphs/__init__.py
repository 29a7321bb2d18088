"""Graphs of exported and traced modules, and graphs for networkx."""
