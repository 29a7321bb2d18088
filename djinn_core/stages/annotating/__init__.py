"""What `annotate` is made of: inputs, training steps, lineage, workload types from three tiers, phases, residency."""
