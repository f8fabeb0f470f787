"""Trajectories -> samples -> a plan of packed micro-batches, with denominators that are global to the step.

`samples` and `plan` are pure and need no torch: the driver runs `plan` on metadata. `tensors` builds what a rank
trains on.
"""
