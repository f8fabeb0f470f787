"""Reward functions: ready-made ones, calls of any plain function, and the weighted sum of several."""
