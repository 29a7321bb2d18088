"""What every plugin of a kind must do, as test suites that its author subclasses; see `djinn.testing`."""
