"""Tasks: reading rows, and an endless stream of them with an exact cursor."""
