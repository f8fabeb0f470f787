"""Pipeline from trajectories to samples to a plan of packed micro-batches, with a loss weight for every token.

`samples` and `packing` are pure and need no torch: the driver plans on metadata. `tensors` builds the tensors a rank
trains on.
"""
