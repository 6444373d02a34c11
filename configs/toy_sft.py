"""The cold start of the toy policy that ships with the package.

    python launch/sft.py --config=configs/toy_sft.py --workdir=runs/toy_sft

writes `runs/toy_sft/policy`, a Hugging Face directory; psearch_jax/assets/toy_policy is a copy of it. The same command
goes on where it was stopped; `--config.seed=1` makes a second cold start from other rows and weights. Fields and
defaults: psearch_jax/train/toy_sft.py.
"""

import dataclasses

from ml_collections import ConfigDict

from psearch_jax.train.toy_sft import ToySFTConfig


def get_config() -> ConfigDict:
    return ConfigDict(dataclasses.asdict(ToySFTConfig()))
