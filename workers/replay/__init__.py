"""Recorded steps, computed again without Ray, for `rlsys replay`."""
