"""Built-in plugins of executors and gateways."""
