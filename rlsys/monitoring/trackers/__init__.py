"""Sinks of the event bus: files, console and trackers. A run reads nothing that they write."""
