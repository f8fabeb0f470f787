"""How the policy is trained: one rank of a data-parallel group, without Ray.

`base` is the contract, `fsdp` the implementation. `model` loads the policy, `scoring` runs it, `optim` steps it,
`checkpoint` saves it; `ranks` is the group of processes, `metrics` what a step reports.
"""
