"""Table filling: a lead splits rows among subagents, which look them up in parallel. All agents share one policy."""
