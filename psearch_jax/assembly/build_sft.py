"""Builds the objects of a supervised fine-tuning run from a config and transcripts."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np

from psearch_jax.assembly.checks import check_run
from psearch_jax.assembly.policies import (
    describe_policy,
    init_adapters,
    load_tokenizer,
    load_weights,
    with_adapter_shape,
)
from psearch_jax.assembly.tools import describe_dialect, make_dialect, make_tools
from psearch_jax.config import Config, with_method
from psearch_jax.data.transcripts import Row, read_rows
from psearch_jax.limits import validate
from psearch_jax.models import hf
from psearch_jax.runtime.paths import packaged
from psearch_jax.sft import learner
from psearch_jax.sft.trainer import SupervisedRun
from psearch_jax.sharding import make_mesh
from psearch_jax.text.prompts import load_template
from psearch_jax.text.tokenizer import Tokenizer
from psearch_jax.train.checkpointing import checkpoint, settings
from psearch_jax.train.state import init_state
from psearch_jax.types import UserError

UNREAD = ("critic", "eval", "learning", "reward", "train")  # sections with no setting that changes the result


def supervised_run(config: Config, transcripts: str) -> SupervisedRun:
    """Builds everything that sft/trainer.py needs; `transcripts` are jsonl files, separated by commas.

    Raises:
      UserError: as `engine` and `read_rows`; input files are checked before any weights are loaded.
    """
    user_config, config = config, with_adapter_shape(with_method(config))
    validate(config, training=False)
    section, m = config.sft, config.model
    path = hf.resolve(m.path) if m.path else ""
    if not (m.tokenizer or path):
        raise UserError(
            "config.model.path: found '', accepted: the weights to train, or config.model.tokenizer with random ones"
        )
    template = None if config.data.prompts_in_rows else load_template(config.data.template)
    tokenizer = Tokenizer.load(packaged(m.tokenizer) or path)
    dialect = make_dialect(config, tokenizer, make_tools(config.rollout))
    rows: list[Row] = []
    for file in transcripts.split(","):
        rows += read_rows(file, dialect, template, config.rollout)
    order = np.random.default_rng([config.seed, 0x5F]).permutation(len(rows))
    held = order[: round(section.validation_share * len(rows))]
    trained = [rows[i] for i in sorted(order[len(held) :])]
    if len(trained) < section.batch_rows:
        raise UserError(
            f"config.sft.batch_rows: found {section.batch_rows} with {len(trained)} training transcripts, accepted: "
            "at most that number"
        )
    mesh = make_mesh(config.mesh)
    dtype = jnp.dtype(m.sampling_dtype) if m.lora_rank else jnp.float32
    model, params, path = load_weights(config, mesh, None, None, dtype)
    tokenizer = load_tokenizer(config, model, path)
    check_run(config, model, mesh, None, processes=1)
    steps = section.epochs * (len(trained) // section.batch_rows)
    optimizer = learner.make_optimizer(section, steps)
    trainer = learner.SupervisedTrainer(
        config,
        model,
        optimizer,
        mesh,
        schedule=learner.cosine_schedule(section.learning_rate, steps),
        vocabulary=tokenizer.size,
        base=params if m.lora else None,
    )
    first = init_adapters(config, model, mesh) if m.lora else params
    contents = describe_policy(m, path, tokenizer) | {
        "rollout.dialect": describe_dialect(config.rollout),
        "data.template": (config.data.template, settings.hash_texts(template or "")),
        "transcripts": (transcripts, learner.hash_rows(rows)),
    }
    return SupervisedRun(
        config=user_config,
        trainer=trainer,
        batches=learner.RowBatches(trained, section.batch_rows, config.seed, trainer.pack),
        held_out=[rows[i] for i in sorted(held)],
        initial_state=functools.partial(init_state, first, optimizer, mesh),
        steps=steps,
        steps_per_epoch=steps // section.epochs,
        record={
            "model": checkpoint.model_record(model),
            "tokenizer": tokenizer.directory,
            "settings": settings.record(config, contents, unused=UNREAD),
            **({"lora": checkpoint.lora_record(m, config.seed, path)} if m.lora else {}),
        },
        checkpoint_every_steps=config.train.checkpoint_every_steps,
        keep_checkpoints=config.train.keep_checkpoints,
    )
