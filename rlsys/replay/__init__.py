"""Records of a run on disk: rollouts, finished groups, failed steps, and the history of a run.

This room reads and writes files. It computes nothing; `workers.replay` trains recorded steps again.
"""
