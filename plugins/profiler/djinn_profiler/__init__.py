"""Time and results of a program: `timeline` and `verification`."""
