"""Plans of recorded programs: planning, the plan cache, and learnt facts."""
