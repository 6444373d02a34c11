"""Every field with its default: what `--config.SECTION.FIELD` sets where `--config` names no file."""

from ml_collections import ConfigDict

from psearch_jax.config.mapping import config_dict


def get_config() -> ConfigDict:
    return config_dict()
