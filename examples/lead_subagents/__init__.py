"""Fill a table: a lead splits its rows among subagents, who look them up in parallel. One policy speaks for all."""
