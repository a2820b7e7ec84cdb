"""The configuration: one tree, loaded without torch."""

from .load import load_config, to_yaml
from .run import RunConfig

__all__ = ["RunConfig", "load_config", "to_yaml"]
