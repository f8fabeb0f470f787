"""vLLM as an engine, in its process or behind its server, and how its weights change."""
