"""`rlsys doctor`: problems of an environment, and their remedies.

`gather` inspects the machine once; every check is a pure function of the result. Neither torch nor ray is loaded:
versions and build variants are read from package metadata.
"""

from rlsys.doctor.checks import Finding, diagnose, ensure_not_shadowed
from rlsys.doctor.facts import Facts, gather

__all__ = ["Facts", "Finding", "diagnose", "ensure_not_shadowed", "gather"]
