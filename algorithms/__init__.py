"""Algorithms that ship with rlsys, one file each. Importing them does not import torch.

`pyproject.toml` lists them in the entry point group `rlsys.algorithms`; other packages add theirs the same way.
"""
