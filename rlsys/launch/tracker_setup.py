"""Trackers of a configuration as sinks of its events."""

from __future__ import annotations

from importlib.util import find_spec

from rlsys.config import Config
from rlsys.errors import ConfigError
from rlsys.launch.preflight import whole_of
from rlsys.monitoring.tracker import RunFacts
from rlsys.monitoring.trackers.tracker_thread import InThread


def check_trackers(config: Config) -> None:
    """Raise `ConfigError` if a tracker needs a missing package, so that a long run does not discover it later."""
    for index, plugin in enumerate(config.tracking):
        if plugin.package and find_spec(plugin.package) is None:
            remedy = f"install it: pip install 'rlsys[{plugin.package}]'"
            raise ConfigError(f"tracking[{index}]: the package {plugin.package} is not installed; {remedy}")


def trackers_of(config: Config) -> list[InThread]:
    """One sink for each tracker of this run, or of this policy of a run of several. The run directory must exist."""
    return [InThread(plugin, facts_of(config)) for plugin in config.tracking]


def facts_of(config: Config) -> RunFacts:
    """Description for trackers of this run, or of this policy of a run of several."""
    whole = whole_of(config.run_dir)
    name, policy = (whole.name, config.run.name) if whole else (config.run.name, "")
    return RunFacts(config.run_dir, name, policy, config.model_dump(mode="json"))
