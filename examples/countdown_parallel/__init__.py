"""Countdown by spawn and join: a parent learns to spawn enough children, which try expressions in parallel."""
