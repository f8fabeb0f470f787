"""Transport of weights: buckets of bytes, hashes, and Ray's object store.

`rlsys.weight_sync` defines the order of a transfer.
"""
