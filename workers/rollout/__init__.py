"""Rollout replicas: workflows run here, and an engine samples for them.

The worker is plain Python; the actor and the pool put it behind Ray.
"""
