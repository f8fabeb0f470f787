"""Configuration: frozen models, and a loader that lists every problem at once. Imports neither torch nor ray."""

from rlsys.config.schema import Config

__all__ = ["Config"]
