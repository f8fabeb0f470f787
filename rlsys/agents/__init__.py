"""Agents: sessions, workflows, environments, tools, the gateway, and the sandbox for programs.

The author of a workflow works with messages only; `Agent` records every token. No module here depends on an engine.
"""
