"""Agents: sessions, workflows, environments, tools, the gateway, and the sandbox for programs.

The author of a workflow works with messages only; this room records every token, and knows no engine.
"""
