"""The planner on described clusters: scenarios beside the figures of the seed documents, and each part switched off in turn."""
