"""The config of a run: frozen dataclasses with units in the names, and their construction from a ConfigDict.

Files in configs/ change some of the defaults; `--config.section.field=value` overrides one field. A field is declared
once, in sections.py, with its default, documentation, accepted values and resume
policy (`setting.setting`). docs/reference.py generates docs/configuration.md from these declarations.
"""

from psearch_jax.config.families import FAMILIES, PRESETS, Family, find_family
from psearch_jax.config.mapping import config_dict, from_mapping, to_mapping
from psearch_jax.config.methods import with_method
from psearch_jax.config.sections import (
    Config,
    LearningSection,
    MeshSection,
    Method,
    ModelSection,
    Remat,
    RetrievalSection,
    RewardSection,
    RolloutSection,
    SFTSection,
    best_metric,
)
from psearch_jax.config.shapes import DecoderConfig, Lora

__all__ = [
    "FAMILIES",
    "PRESETS",
    "Config",
    "DecoderConfig",
    "Family",
    "LearningSection",
    "Lora",
    "MeshSection",
    "Method",
    "ModelSection",
    "Remat",
    "RetrievalSection",
    "RewardSection",
    "RolloutSection",
    "SFTSection",
    "best_metric",
    "config_dict",
    "find_family",
    "from_mapping",
    "to_mapping",
    "with_method",
]
