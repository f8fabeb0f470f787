"""The index of a run: what its files say, as tables that SQL reads."""
