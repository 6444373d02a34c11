"""The config of a run, made of its sections."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from psearch_jax.config.rollout_sections import (
    DataSection,
    MeshSection,
    ModelSection,
    RetrievalSection,
    RolloutSection,
)
from psearch_jax.config.setting import SEED, setting
from psearch_jax.config.training_sections import (
    CriticSection,
    EvalSection,
    LearningSection,
    RewardSection,
    SFTSection,
    TrainSection,
)

Method = Literal["parallelsearch", "search_r1", "parallel_prompt", "r1"]


@dataclass(frozen=True)
class Config:
    """The config of a run. `launch/train.py` writes it to config.json in the run directory."""

    seed: int = setting(0, "Seed of rollouts, question order, and random weights or adapters.", accepted=SEED)
    method: Method = setting("parallelsearch", "The paper's method, or a baseline (see Methods below).")
    model: ModelSection = ModelSection()
    mesh: MeshSection = MeshSection()
    data: DataSection = DataSection()
    retrieval: RetrievalSection = RetrievalSection()
    rollout: RolloutSection = RolloutSection()
    reward: RewardSection = RewardSection()
    learning: LearningSection = LearningSection()
    critic: CriticSection = CriticSection()
    train: TrainSection = TrainSection()
    eval: EvalSection = EvalSection()
    sft: SFTSection = SFTSection()
