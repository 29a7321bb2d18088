"""Templates, the values of a session, and one run after the other."""
