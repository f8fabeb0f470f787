"""Answers of the dashboard: what a page or a command shows of a run."""
