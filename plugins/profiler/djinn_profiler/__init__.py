"""Analysis of programs: `captured` programs and their plans, `semantics` of nodes, `timeline` and `verification`."""
