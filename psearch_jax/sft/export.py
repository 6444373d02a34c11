"""Writes the policy of a supervised run in Hugging Face format."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from pathlib import Path

import jax

from psearch_jax.config import Lora
from psearch_jax.models.hf import save_hf
from psearch_jax.runtime import processes
from psearch_jax.text.tokenizer import Tokenizer
from psearch_jax.train.checkpointing.checkpoint import load_params
from psearch_jax.train.checkpointing.run_config import make_export_shape


def write_policy(workdir: Path, files: Mapping[str, bytes] | None = None) -> None:
    """Writes WORKDIR/policy from the last checkpoint, in the host's memory: one device may be too small.

    Args:
      files: to add, by name.
    """
    policy = workdir / "policy"
    if not processes.first():
        return
    if jax.process_count() > 1:
        print(f"several processes; to write the policy: launch/export_hf.py --checkpoint={workdir} --out={policy}")
        return
    gc.collect()  # frees the weights of a run that the caller has dropped
    model, params, loop = load_params(workdir)
    tokenizer, lora = Tokenizer.load(loop["tokenizer"], model.eos_ids), loop.get("lora")
    adapters = Lora(lora["rank"], lora["alpha"]) if lora else None
    save_hf(params, make_export_shape(model, tokenizer), tokenizer.directory, policy, lora=adapters, files=files)
    print(f"{policy}: written")
