"""How policy and critic are trained: one rank of a data-parallel group, without Ray.

`base` is the contract, `fsdp` the policy, `values` the critic. Both stand on `sharded` (weights, optimizer, updates)
and `step` (a step's micro-batches, as an algorithm sees them). `model` loads, `scoring` runs, `optim` steps,
`checkpoint` saves; `ranks` is the group of processes, `metrics` what a step reports, `reading` what it made of each
token. `replay` computes a step that failed once more, in one process; `retrain` trains recorded steps again, on as many
ranks as the run had.
"""
