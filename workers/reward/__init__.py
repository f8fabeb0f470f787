"""Reward workers: reward functions in killable processes, and reward models.

The workers are plain Python; the reward pool runs them as Ray actors.
"""
