"""Recorded steps, computed again without Ray.

`rlsys replay` uses this room.
"""
