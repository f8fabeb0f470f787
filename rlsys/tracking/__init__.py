"""Sinks of the event bus: files, and what a person watches. Nothing in a run reads what is written here."""
