"""Calls of the operating system, with an answer for each platform."""
