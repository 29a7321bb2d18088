"""Plans for simulated clusters: scenarios with promised speedups, and ablations of patterns and optimizations."""
