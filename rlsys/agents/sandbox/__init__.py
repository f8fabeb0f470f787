"""Programs that a model or a user wrote, run in processes that can be limited and killed.

Nothing here knows about agents or training.
"""
