"""The cold start of the toy policy that ships with the package.

    python launch/sft.py --config=configs/toy_sft.py --workdir=runs/toy_sft

writes `runs/toy_sft/policy`, a Hugging Face directory; psearch_jax/assets/toy_policy is a copy of it. It takes ten to
fifteen minutes on two CPU cores. Fields and defaults: psearch_jax/train/sft.py.
"""

import dataclasses

from ml_collections import ConfigDict

from psearch_jax.data.scripted import Mixture
from psearch_jax.train.sft import SFTConfig


def get_config() -> ConfigDict:
    return ConfigDict(dataclasses.asdict(SFTConfig(mixture=Mixture(split=0.25, wrong_split=0.15))))
