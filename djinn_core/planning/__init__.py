"""Plan a captured graph into a schedule: the pipeline, its stages, matching and the built-in plugins."""
