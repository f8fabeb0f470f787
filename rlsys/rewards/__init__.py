"""Reward functions: the ready-made ones, and how any plain function is called by the names of its arguments."""
