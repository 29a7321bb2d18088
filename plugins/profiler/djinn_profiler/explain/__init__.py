"""Plans as people read them: text and JSON, and what renderers of plugins make of them."""
