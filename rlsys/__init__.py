"""rlsys: reinforcement-learning post-training of language models, orchestrated on Ray.

Importing this package loads neither torch nor ray.
"""
