"""An agent that is written against the `openai` client and knows nothing of training, trained as it is."""
