"""Research in rounds, each on a workspace of constant size."""
