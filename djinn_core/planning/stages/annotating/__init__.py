"""Parts of the `annotate` stage: inputs, training steps, lineage, workload types from three tiers, phases, residency."""
