"""Reward workers: reward functions in killable processes, and reward models.

The worker is plain Python; the actor and the pool put it behind Ray.
"""
