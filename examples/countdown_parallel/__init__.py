"""Countdown by spawn and join: a parent has children try expressions in parallel, and learns to try enough of them."""
