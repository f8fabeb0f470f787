"""A proposer and a solver, each with a separate policy."""
