"""Transfer of weights from the actor to the rollouts: publish, relay, pull, verify.

This package owns the order of a weight change. It moves references and manifests, never tensors.
"""
