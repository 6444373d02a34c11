"""The config of a run: frozen dataclasses with units in the names, and their construction from a ConfigDict.

Files in configs/ change some of the defaults; `--config.section.field=value` overrides one field. A field is declared
once, in rollout_sections.py or training_sections.py, with its default, documentation, accepted values and resume
policy (`setting.setting`). docs/reference.py generates docs/configuration.md from these declarations.
"""

from psearch_jax.config.mapping import config_dict, from_mapping, to_mapping
from psearch_jax.config.methods import with_method
from psearch_jax.config.rollout_sections import (
    DataSection,
    MeshSection,
    ModelSection,
    Remat,
    RetrievalSection,
    RolloutSection,
)
from psearch_jax.config.sections import Config, Method
from psearch_jax.config.shapes import PRESETS, DecoderConfig, Lora
from psearch_jax.config.training_sections import (
    CriticSection,
    EvalSection,
    LearningSection,
    RewardSection,
    SFTSection,
    TrainSection,
    best_metric,
)

__all__ = [
    "PRESETS",
    "Config",
    "CriticSection",
    "DataSection",
    "DecoderConfig",
    "EvalSection",
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
    "TrainSection",
    "best_metric",
    "config_dict",
    "from_mapping",
    "to_mapping",
    "with_method",
]
