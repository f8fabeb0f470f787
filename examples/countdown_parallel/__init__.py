"""Countdown by spawn and join: a parent spawns children that try expressions in parallel, and learns to spawn
enough."""
