"""Thinking in segments, with a reward for the progress of each."""
