"""The cold starts of the toy policies that ship with the package.

    python launch/sft.py --config=configs/toy_sft.py --workdir=runs/toy_sft

writes `runs/toy_sft/policy`, a Hugging Face directory; psearch_jax/assets/toy_policy is a copy of it, and
psearch_jax/assets/toy_tools_policy one of `--config.dialect=tool_calls --config.steps=4000`. The same command resumes
an interrupted run. `--config.seed=1` makes another cold start with other rows and initial weights. The fields and
defaults are in psearch_jax/sft/cold_start.py.
"""

import dataclasses

from ml_collections import ConfigDict

from psearch_jax.sft.cold_start import ToySFTConfig


def get_config() -> ConfigDict:
    return ConfigDict(dataclasses.asdict(ToySFTConfig()))
