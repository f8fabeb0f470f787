"""Ray in one place: the cluster, actors, calls with deadlines, pools.

Every `.remote()` of the project is in this room or in a room that builds on it.
"""
