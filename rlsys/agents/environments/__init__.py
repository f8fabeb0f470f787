"""Adapters to third-party environments, see `rlsys.agents.environment.ADAPTERS`, whose packages are optional."""
