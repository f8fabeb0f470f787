"""Multiplication with a calculator: the tiny policy learns to call a tool for products that it cannot compute."""
