"""Transport of weights: buckets of bytes, checksums, and the memory through which other processes read them.

`rlsys.weight_sync` defines the order of a transfer.
"""
