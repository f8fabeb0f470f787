"""Events of a run, the catalog of its metrics, alerts, and trackers.

Everything here reads events. Nothing in a run depends on what this room writes.
"""
