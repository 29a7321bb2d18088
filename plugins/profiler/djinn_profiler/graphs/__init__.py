"""Graphs of exported and traced modules, and conversion to networkx."""
