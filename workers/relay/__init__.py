"""Relay workers: one per node, each keeps the newest weights in its node's memory.

The relay class is `rlsys.weight_sync.relay`; this package runs it as Ray actors.
"""
