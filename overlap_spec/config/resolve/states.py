"""Resolves the flags of recurrent states and of their snapshots, which are SGLang's."""

import msgspec

from overlap_spec.config import CacheSettings, EngineConfig, ModelFiles
from overlap_spec.config.speculation import keeps_states
from overlap_spec.errors import ConfigError

DTYPE = "mamba_ssm_dtype"  # a key of config.json, too
SIZE = "max_mamba_cache_size"
FLAGS = (DTYPE, SIZE, "mamba_full_memory_ratio", "mamba_track_interval", "mamba_radix_cache_strategy")
OF_SNAPSHOTS = FLAGS[2:]
DEFAULT_STRATEGY = "auto"


def check_states(config: EngineConfig, files: ModelFiles) -> None:
    """Raises: ConfigError naming a flag that has no effect here."""
    given = [flag for flag in FLAGS if getattr(config, flag) not in (None, DEFAULT_STRATEGY)]
    if given and not keeps_states(files.config):
        raise ConfigError(given[0], "the target has no layers with a recurrent state; leave it out")
    useless = next((flag for flag in given if flag in OF_SNAPSHOTS), None)
    if useless is not None and config.disable_radix_cache:
        raise ConfigError(
            useless, "has no effect without a prefix cache; leave out one of it and --disable-radix-cache"
        )
    if config.mamba_full_memory_ratio is not None and config.max_mamba_cache_size is not None:
        raise ConfigError(SIZE, "gives the number of states, and --mamba-full-memory-ratio their share; leave one out")


def running_with_states(config: EngineConfig, default: int) -> int:
    """Requests that run at once: no more than there are states for, one of which is a snapshot.

    Raises: ConfigError if both numbers are given and do not go together.
    """
    asked, states = config.max_running_requests, config.max_mamba_cache_size
    if states is None:
        return asked or default
    snapshots = 0 if config.disable_radix_cache else 1
    running = asked or min(default, states - snapshots)
    if running < 1 or states < running + snapshots:
        least, beside = max(running, 1) + snapshots, " and one snapshot for the prefix cache" if snapshots else ""
        raise ConfigError(
            SIZE,
            f"found {states}, expected at least {least}: a state for each of {max(running, 1)} running requests"
            f"{beside}; raise it, lower --max-running-requests, or use --disable-radix-cache",
        )
    return running


def with_state_dtype(config: EngineConfig, files: ModelFiles) -> ModelFiles:
    """The flag goes before config.json."""
    if config.mamba_ssm_dtype is None:
        return files
    return msgspec.structs.replace(files, config=files.config | {DTYPE: config.mamba_ssm_dtype})


def with_snapshots(config: EngineConfig, cache: CacheSettings) -> CacheSettings:
    """What the prefix cache has room for, and how often it is used."""
    asked = {
        "state_ratio": config.mamba_full_memory_ratio,
        "max_states": config.max_mamba_cache_size,
        "snapshot_interval": config.mamba_track_interval,
    }
    return msgspec.structs.replace(cache, **{name: value for name, value in asked.items() if value is not None})
