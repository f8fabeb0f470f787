"""An agent written against the `openai` client, trained without changes."""
