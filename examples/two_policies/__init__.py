"""A proposer and a solver, each a policy of its own."""
