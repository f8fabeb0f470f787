"""Training of policy and critic: one rank of a data-parallel group, without Ray.

`backend` is the contract, `fsdp` the policy, `value_model` the critic. Both use `sharded` (weights, optimizer, updates)
and `step_data` (a step's micro-batches, as an algorithm sees them). `actor_rank`, `critic_rank` and `reference_worker`
are the workers, and `train_handles` the driver's view of them.
"""
