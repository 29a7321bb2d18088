"""The planner on described clusters: scenarios with the promised figures, and ablations of each part."""
