"""Records of a run on disk: rollouts, finished groups, failed steps, and the history of a run.

These modules read and write files and compute nothing; `workers.replay` trains recorded steps again.
"""
