"""Processes with limits and cleanup, for programs that a model or a user wrote. Independent of agents and training."""
