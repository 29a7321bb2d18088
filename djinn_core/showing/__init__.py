"""Plans as people read them: text, JSON, pictures and notebooks."""
