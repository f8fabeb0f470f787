"""The algorithms that come with rlsys, one file each. Importing them does not import torch.

`pyproject.toml` names them in the entry point group `rlsys.algorithms`; another package adds its own the same way.
"""
