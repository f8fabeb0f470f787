"""Multiplying with a calculator: the tiny policy learns to call a tool for what it cannot do in its head."""
