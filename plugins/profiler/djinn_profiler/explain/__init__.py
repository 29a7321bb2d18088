"""Human-readable plans: as text, as JSON, and in the formats of renderer plugins."""
