"""Relay workers: one per node, each keeps the newest weights in the memory of its node.

The relay itself is `rlsys.weight_sync.relay`; this room puts it behind Ray.
"""
