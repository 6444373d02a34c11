"""What a config, a model and meshes must agree on, checked before weights are placed or programs compiled."""

from __future__ import annotations

from jax.sharding import Mesh

from psearch_jax.config import Config, DecoderConfig
from psearch_jax.sharding import check_heads, check_rows
from psearch_jax.types import UserError


def check_run(
    config: Config, model: DecoderConfig, mesh: Mesh | None, rollout_mesh: Mesh | None, processes: int
) -> None:
    """Checks heads, positions, rows and slots against the model and the devices.

    Args:
      mesh: the one that trains; None if nothing is trained.
      rollout_mesh: the one that samples; None if nothing is sampled.
      processes: the number of processes that share prompts and slots.

    Raises:
      UserError: one line that names the field.
    """
    context = config.rollout.context_tokens
    if context > model.max_positions:
        raise UserError(
            f"config.rollout.context_tokens: found {context}, accepted: at most the model's {model.max_positions} "
            "positions"
        )
    shared = {}
    if mesh is not None:
        check_heads(mesh, model.heads)
        check_rows(mesh, learning__micro_batch_rows=config.learning.micro_batch_rows)
        shared["train.prompts"] = config.train.prompts
    if rollout_mesh is not None:
        check_heads(rollout_mesh, model.heads, "rollout_tensor" if config.mesh.rollout_tensor else "tensor")
        check_rows(rollout_mesh, rollout__slots=config.rollout.slots)
        shared["rollout.slots"] = config.rollout.slots
    for field, value in shared.items():
        if value % processes:
            raise UserError(f"config.{field}: found {value}, accepted: a multiple of the {processes} processes")
