"""Tasks: reading rows, and an endless stream of tasks with an exact cursor."""
