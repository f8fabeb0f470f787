"""Ready-made workflows, each a dataclass whose fields are its keys under `rollout.workflow`. Subclass them for your own
roles: what they read and write is in small methods."""
