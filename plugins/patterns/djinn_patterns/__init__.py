"""Patterns: parts of models that are recognised by data flow."""
