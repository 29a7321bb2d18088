"""Execution of templates over the values of a session."""
