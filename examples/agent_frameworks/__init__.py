"""Agents of openai-agents and smolagents, trained without changes."""
