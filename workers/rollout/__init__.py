"""Rollout replicas: they run workflows, and sample from an engine.

The workers are plain Python; the rollout pool runs them as Ray actors.
"""
