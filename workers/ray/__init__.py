"""Ray in one place: the cluster, actors, calls with deadlines, pools.

Only this package and packages that build on it use Ray.
"""
