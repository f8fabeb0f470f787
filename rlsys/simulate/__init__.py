"""Simulations of a cluster: the real driver on simulated workers and a virtual clock."""
