"""Ready-made workflows, each a dataclass whose fields are keys of `rollout.workflow`. Subclass them for new roles:
small methods read replies and write prompts."""
