"""Patterns that recognise parts of models by data flow."""
