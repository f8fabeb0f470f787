"""Sinks of the event bus: files, what a person watches, and trackers. Nothing in a run reads what is written here."""
