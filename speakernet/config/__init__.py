"""Configuration: combines the options of all packages and loads them from YAML files and the
command line.
"""

from speakernet.config.loading import ConfigError, LoadedConfig, load_config
from speakernet.config.schema import Config, config_from_dict

__all__ = ["Config", "ConfigError", "LoadedConfig", "config_from_dict", "load_config"]
