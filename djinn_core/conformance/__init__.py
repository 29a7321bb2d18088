"""Conformance test suites for each kind of plugin, which the plugin's author subclasses; see `djinn.testing`."""
