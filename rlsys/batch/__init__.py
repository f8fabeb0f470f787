"""Trajectories -> samples -> a plan of packed micro-batches, in which every token has its weight in the loss.

`samples` and `plan` are pure and need no torch: the driver runs `plan` on metadata. `tensors` builds what a rank
trains on.
"""
