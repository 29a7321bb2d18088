"""What a program does: `captured` programs and their plans, `semantics` of their nodes, `timeline` and `verification`."""
