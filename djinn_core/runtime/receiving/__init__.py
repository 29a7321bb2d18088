"""Responses of executors, and failures there."""
