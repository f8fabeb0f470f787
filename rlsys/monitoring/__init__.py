"""Events of a run, the catalog of its metrics, alerts, and trackers.

These modules read events. A run depends on nothing that they write.
"""
