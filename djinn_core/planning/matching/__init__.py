"""Matching language for patterns: terms that describe how ops feed each other."""
