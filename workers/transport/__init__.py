"""How weights travel: buckets of bytes, hashes, and Ray's object store.

The order of a transfer is the business of `rlsys.weight_sync`.
"""
