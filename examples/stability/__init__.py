"""Measured effects of staleness on training, and of gradient alignment control."""
