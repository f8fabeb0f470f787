"""Training of policy and critic: one rank of a data-parallel group, without Ray.

`fsdp` is the policy, `value_model` the critic. Both derive from `sharded` (weights, optimizer, updates, checkpoint) and
use `step_data` (a step's micro-batches, as an algorithm sees them). `layout` puts a model over ranks, and
`row_attention` computes the rows of micro-batches. `ranks` and `reference_worker` are the workers, and `train_handles`
the driver's view of them.
"""
