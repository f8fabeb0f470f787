"""Weights on their way from the actor to the rollouts: publish, relay, pull, verify.

This room owns the order of a weight change. It moves references and manifests, never tensors.
"""
