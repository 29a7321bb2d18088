"""From a captured graph to a schedule: the pipeline, its stages, matching and the built-in plugins."""
