"""The peer: transformers on PyTorch with our weights, doing the same work, optimized as far as possible.

`TorchRollouts` keeps the KV cache over all turns in preallocated arrays (transformers' own cache is copied at every
token), prefills a group's prompt once, drops finished rows once a quarter of the rows has finished its turn, and
refills free rows at the end of every turn. With `keep=False` it does what Search-R1 does: it drops the cache after
every turn and prefills all text again.

Letters as in the model: B rows, T query positions, S key positions, K kv heads, H head dim.
"""

from __future__ import annotations

import tempfile
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flax import nnx
from transformers import Qwen2ForCausalLM

from benchmarks.speed.scripted import Work
from psearch_jax.config import DecoderConfig, LearningSection, Lora
from psearch_jax.models import hf
from psearch_jax.models.peft import module_name
from psearch_jax.types import TrainBatch

TOKENIZER = Path(hf.__file__).resolve().parents[1] / "assets" / "toy_policy"  # an export needs one; it is not used
SPARE = 0.75  # finished rows are dropped when at most this share of the rows still samples


def torch_model(params: nnx.State, config: DecoderConfig, dtype: str = "float32") -> Qwen2ForCausalLM:
    """Our weights in transformers' model, through an export."""
    with tempfile.TemporaryDirectory() as folder:
        hf.save_hf(params, config, TOKENIZER, f"{folder}/model")
        model = Qwen2ForCausalLM.from_pretrained(
            f"{folder}/model", dtype=getattr(torch, dtype), attn_implementation="sdpa"
        )
    return model.eval()


def add_adapters(model: Qwen2ForCausalLM, adapters: nnx.State, lora: Lora) -> None:
    """Freezes the weights and adds our adapters, which are trained in float32."""
    model.requires_grad_(False)
    for path, variable in nnx.to_flat_state(adapters):
        kernel, side = path[-1].rsplit("_", 1)
        for layer, values in enumerate(np.asarray(variable.get_value())):
            name = module_name(kernel, layer)
            linear = model.get_submodule(name)
            if not isinstance(linear, _Adapted):
                linear = _Adapted(linear, lora.scale)
                parent, _, child = name.rpartition(".")
                setattr(model.get_submodule(parent), child, linear)
            matrix = values.reshape(-1, lora.rank) if side == "a" else values.reshape(lora.rank, -1)
            setattr(linear, side, torch.nn.Parameter(torch.from_numpy(matrix.copy())))


class _Adapted(torch.nn.Module):
    """A linear layer and an adapter: x W + scale (x a) b."""

    def __init__(self, linear: torch.nn.Module, scale: float):
        super().__init__()
        self.linear, self.scale = linear, scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        low = x @ self.a.to(x.dtype) * self.scale
        return self.linear(x) + low @ self.b.to(x.dtype)


def token_logprobs(model: Qwen2ForCausalLM, ids: np.ndarray) -> np.ndarray:
    """Log-prob of every token of one row [S] given the earlier ones; 0 for the first. [S] float32."""
    every = torch.arange(1, len(ids))[None]
    with torch.no_grad():
        logprobs = _logprobs(model, torch.from_numpy(ids[None]).long(), every)[0]
    return torch.cat([torch.zeros(1), logprobs]).numpy()


def _logprobs(model: Any, ids: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """Log-probs [B, M] of the token ids [B, S] at positions `at` [B, M]; logits are computed only there."""
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
    before = hidden.gather(1, (at - 1)[..., None].expand(-1, -1, hidden.shape[-1]))
    logits = model.lm_head(before).float()
    chosen = ids.gather(1, at).flatten()
    return -torch.nn.functional.cross_entropy(logits.flatten(0, 1), chosen, reduction="none").view(at.shape)


# ---- rollouts ----


class _Cache:
    """Keys and values of all rows, written in place and attended to up to the last position of any row.

    transformers calls only `update`; `at` sets the positions of the next forward pass.
    """

    def __init__(self, config: DecoderConfig, rows: int, positions: int, dtype: torch.dtype):
        shape = (config.layers, rows, config.kv_heads, positions, config.head_dim)
        self.k, self.v = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)

    def at(self, start: torch.Tensor, T: int) -> torch.Tensor | None:
        """Rows 0 .. B - 1 get T tokens from position `start` [B] on. Returns the mask [B or 1, 1, T, S], or None."""
        self._first = int(start[0]) if bool((start == start[0]).all()) else None
        self._end = int(start.max()) + T
        self._positions = start[:, None] + torch.arange(T)
        if self._first == 0 or (self._first is not None and T == 1):
            return None  # causal attention, or one token that attends to all earlier ones
        positions = self._positions if self._first is None else self._positions[:1]
        return (torch.arange(self._end) <= positions[..., None])[:, None]

    def update(self, k: torch.Tensor, v: torch.Tensor, layer: int, *_: Any, **__: Any) -> tuple[torch.Tensor, ...]:
        """Stores k, v [B, K, T, H] of one layer; returns those of all positions, [B, K, S, H]."""
        B, T = len(k), k.shape[2]
        out = []
        for kept, new in ((self.k[layer], k), (self.v[layer], v)):
            if self._first is not None:
                kept[:B, :, self._first : self._end] = new
            else:
                kept[torch.arange(B)[:, None], :, self._positions] = new.transpose(1, 2)
            out.append(new if self._first == 0 and T > 1 else kept[:B, :, : self._end])
        return tuple(out)

    def permute(self, order: torch.Tensor, positions: int) -> None:
        """Moves row order[i] to row i, for the first `positions` positions."""
        for kept in (self.k, self.v):
            kept[:, : len(order), :, :positions] = kept[:, order, :, :positions]


class TorchRollouts:
    """Samples a `Work`. After `run`: `ids` and `logprobs` by rollout; the log-probs of forced tokens are 0."""

    def __init__(self, work: Work, config: DecoderConfig, model: Qwen2ForCausalLM, keep: bool):
        self._work, self._config, self._model, self._keep = work, config, model, keep
        self._prompts = [torch.tensor(p) for p in work.prompts(config.vocab_rows)]
        rng = np.random.default_rng(2)
        self._observations = [
            [torch.from_numpy(rng.integers(0, config.vocab_rows, n)) for n in s.observations] for s in work.scripts
        ]

    @torch.inference_mode()
    def run(self) -> None:
        work = self._work
        room = work.longest + max([n for s in work.scripts for n in s.observations], default=0)  # includes padding
        self._cache = _Cache(self._config, work.slots, room, self._model.dtype)
        self.ids: dict[int, np.ndarray] = {}
        self.logprobs: dict[int, np.ndarray] = {}
        waiting: deque[int] = deque(range(len(work.scripts)))
        prompts: dict[int, tuple[torch.Tensor, ...]] = {}  # by group: keys, values, and the last hidden state
        known = torch.zeros(work.slots, room, dtype=torch.long)
        logprobs = torch.zeros(work.slots, room)
        length = torch.zeros(work.slots, dtype=torch.long)
        rows: list[tuple[int, int]] = []  # (rollout, turn) of the rows in use, which come first
        while rows or waiting:
            going = len(rows)
            rows += [(waiting.popleft(), 0) for _ in range(min(work.slots - going, len(waiting)))]
            read = length - 1  # tokens in the cache, for rows that continue
            for row, (rollout, turn) in enumerate(rows):
                if not turn:
                    length[row], logprobs[row] = 0, 0
                new = self._observations[rollout][turn - 1] if turn else self._prompts[rollout // work.samples]
                known[row, length[row] : length[row] + len(new)] = new
                length[row] += len(new)
            if self._keep:
                parts = [self._extended(known, read[:going], length[:going])] if going else []
                hidden = torch.cat([*parts, *self._admitted(rows[going:], going, prompts)])
            else:
                hidden = self._extended(known, torch.zeros_like(read[: len(rows)]), length[: len(rows)])
            order = self._turn(known, logprobs, length, hidden, [work.scripts[r].turns[t] for r, t in rows])
            rows = [rows[i] for i in order.tolist()]
            over = [row for row, (r, t) in enumerate(rows) if t + 1 == len(work.scripts[r].turns)]
            for row in over:
                self.ids[rows[row][0]] = known[row, : length[row]].numpy().copy()
                self.logprobs[rows[row][0]] = logprobs[row, : length[row]].numpy().copy()
            remaining = [row for row in range(len(rows)) if row not in set(over)]
            self._reorder(torch.tensor([*remaining, *over]), known, logprobs, length)
            rows = [(rows[row][0], rows[row][1] + 1) for row in remaining]

    def _admitted(
        self, rows: list[tuple[int, int]], first: int, prompts: dict[int, tuple[torch.Tensor, ...]]
    ) -> list[torch.Tensor]:
        """Prefills the prompts of new rows, each once, and copies their caches. Returns [1, D] for each row."""
        groups = [rollout // self._work.samples for rollout, _ in rows]
        if wanted := sorted(set(groups) - set(prompts)):
            ids = torch.stack([self._prompts[q] for q in wanted])
            pool = _Cache(self._config, *ids.shape, self._model.dtype)
            hidden = self._forward(pool, ids, torch.zeros(len(ids), dtype=torch.long))[:, -1:]
            prompts.update({q: (pool.k[:, i], pool.v[:, i], hidden[i]) for i, q in enumerate(wanted)})
        for row, q in enumerate(groups, first):
            for kept, new in zip((self._cache.k, self._cache.v), prompts[q][:2], strict=True):
                kept[:, row, :, : new.shape[2]] = new
        out = [prompts[q][2] for q in groups]
        for q in [q for q in prompts if groups and q < groups[-1]]:
            del prompts[q]  # groups are admitted in order, so this one is finished
        return out

    def _extended(self, known: torch.Tensor, read: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
        """Prefills the tokens of the first rows that are not in the cache. Returns the last hidden states [B, D]."""
        n = length - read
        at = read[:, None] + torch.arange(int(n.max()))
        hidden = self._forward(self._cache, known[: len(n)].gather(1, at), read)
        return hidden[torch.arange(len(n)), n - 1]

    def _forward(self, cache: _Cache, ids: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
        """Token ids [B, T] from position start[b] on, with the cache's first B rows. Returns [B, T, D]."""
        T = ids.shape[1]
        mask = {"full_attention": cache.at(start, T)}
        out = self._model.model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=start[:, None] + torch.arange(T),
            past_key_values=cache,
            use_cache=True,
        )
        return out.last_hidden_state

    def _turn(
        self, known: torch.Tensor, logprobs: torch.Tensor, length: torch.Tensor, hidden: torch.Tensor, left: list[int]
    ) -> torch.Tensor:
        """Samples a turn of `left[b]` tokens for every row, and reorders rows. Returns each row's old index [B]."""
        budget, places = torch.tensor(left), torch.arange(len(left))
        active = len(left)
        while True:
            scores = torch.log_softmax(self._model.lm_head(hidden).float(), dim=-1)
            token = torch.multinomial(scores.exp(), 1)
            sampling = budget[:active] > 0
            rows = torch.arange(active)[sampling]
            known[rows, length[rows]] = token[sampling, 0]
            logprobs[rows, length[rows]] = scores.gather(1, token)[sampling, 0]
            length[rows] += 1
            budget[rows] -= 1
            going = budget[:active] > 0
            count = int(going.sum())
            if not count:
                return places
            if count <= SPARE * active:
                order = torch.cat([going.nonzero()[:, 0], (~going).nonzero()[:, 0], torch.arange(active, len(left))])
                self._reorder(order, known, logprobs, length)
                budget, places, active = budget[order], places[order], count
            at = length[:active] - 1
            hidden = self._forward(self._cache, known[torch.arange(active), at][:, None], at)[:, 0]

    def _reorder(self, order: torch.Tensor, known: torch.Tensor, logprobs: torch.Tensor, length: torch.Tensor) -> None:
        n = len(order)
        if bool((order == torch.arange(n)).all()):
            return
        self._cache.permute(order, int(length[:n].max()))
        for x in (known, logprobs, length):
            x[:n] = x[order]


# ---- updates ----


class TorchUpdate:
    """The same loss and optimizer step as ours, in micro-batches, for the parameters that require a gradient.

    Args:
      model: is changed in place.
      widths: the widths that micro-batches are padded to; None: each to its longest row.
    """

    def __init__(
        self,
        model: Qwen2ForCausalLM,
        learning: LearningSection,
        widths: tuple[int, ...] | None,
        compiled: bool,
    ):
        self._model, self._learning, self._widths = model.train(), learning, widths
        if compiled:
            torch.compiler.reset()  # otherwise earlier contenders' widths count towards the recompile limit
        self._logprobs: Callable = torch.compile(_logprobs, dynamic=False) if compiled else _logprobs
        self._trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._optimizer = torch.optim.AdamW(
            self._trained,
            learning.learning_rate,
            (learning.beta1, learning.beta2),
            weight_decay=learning.weight_decay,
            fused=True,
        )

    def lay(self, batch: TrainBatch) -> None:
        """Prepares a batch for the next `run`."""
        learning, widths = self._learning, self._widths
        order = np.argsort(batch.length, kind="stable")
        most = int(batch.mask[:, 1:].sum(1).max())
        self._pieces = []
        for i in range(0, len(order), learning.micro_batch_rows):
            rows = order[i : i + learning.micro_batch_rows]
            longest = int(batch.length[rows].max())
            width = longest if widths is None else next(w for w in widths if w >= longest)
            take = {name: torch.from_numpy(getattr(batch, name)[rows, :width]) for name in _FIELDS}
            counts = take["mask"].clone()
            counts[:, 0] = 0  # the first token has no predecessor
            # Sampled tokens first, and the same number in every micro-batch: each number compiles a program.
            at = counts.argsort(dim=1, descending=True, stable=True)[:, :most]
            more = {"at": at.clamp(min=1), "real": counts.gather(1, at)}
            more |= {"ids": take["ids"].long(), "length": torch.from_numpy(batch.length[rows])}
            self._pieces.append(take | more)
        self._count = float(batch.mask[:, 1:].sum())

    def refer(self, reference: Qwen2ForCausalLM) -> None:
        """Sets the reference model's log-probs of the batch prepared by `lay`."""
        with torch.no_grad():
            for piece in self._pieces:
                piece["ref_logprobs"].scatter_(1, piece["at"], self._logprobs(reference, piece["ids"], piece["at"]))

    def run(self) -> dict[str, float]:
        """One update. Returns the loss and the gradient norm."""
        self._optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for piece in self._pieces:
            loss = self._loss(piece)
            loss.backward()
            total += float(loss.detach())
        norm = torch.nn.utils.clip_grad_norm_(self._trained, self._learning.gradient_clip)
        self._optimizer.step()
        return {"loss": total, "gradient_norm": float(norm)}

    def _loss(self, piece: dict[str, torch.Tensor]) -> torch.Tensor:
        """The clipped objective with the k3 estimate of the KL term, divided by all sampled tokens of the batch."""
        learning, logp = self._learning, self._logprobs(self._model, piece["ids"], piece["at"])
        old, ref, advantage = (
            piece[name].gather(1, piece["at"]) for name in ("old_logprobs", "ref_logprobs", "advantage")
        )
        ratio = torch.exp(logp - old)
        clipped = ratio.clamp(1 - learning.clip_low, 1 + learning.clip_high)
        kl = torch.exp(ref - logp) - (ref - logp) - 1
        value = torch.minimum(ratio * advantage, clipped * advantage) - learning.kl_coefficient * kl
        return -(value * piece["real"]).sum() / self._count


class TrlUpdate(TorchUpdate):
    """The same with TRL's loss, which computes logits only after the prompt."""

    def __init__(self, model: Qwen2ForCausalLM, learning: LearningSection):
        from datasets import Dataset
        from transformers import PreTrainedTokenizerFast
        from trl import GRPOConfig, GRPOTrainer

        super().__init__(model, learning, widths=None, compiled=False)
        with tempfile.TemporaryDirectory() as folder:
            arguments = GRPOConfig(
                output_dir=folder,
                loss_type="dapo",  # the mean over tokens
                beta=0.0,  # otherwise TRL loads a reference model; we supply its log-probs
                epsilon=learning.clip_low,
                epsilon_high=learning.clip_high,
                per_device_train_batch_size=learning.micro_batch_rows,
                num_generations=learning.micro_batch_rows,
                steps_per_generation=1,
                gradient_checkpointing=False,
                bf16=False,
                use_cpu=True,
                report_to=[],
            )
            self._trainer = GRPOTrainer(
                model,
                reward_funcs=lambda prompts, **_: [0.0] * len(prompts),
                args=arguments,
                train_dataset=Dataset.from_dict({"prompt": [""]}),
                processing_class=PreTrainedTokenizerFast.from_pretrained(TOKENIZER),
            )
        self._trainer.beta, self._trainer.current_gradient_accumulation_steps = learning.kl_coefficient, 1

    def _loss(self, piece: dict[str, torch.Tensor]) -> torch.Tensor:
        known = torch.arange(piece["ids"].shape[1]) < piece["length"][:, None]
        first = int(piece["mask"].nonzero()[:, 1].min())  # every row is prompt up to here
        inputs = {
            "prompt_ids": piece["ids"][:, :first],
            "prompt_mask": known[:, :first].long(),
            "completion_ids": piece["ids"][:, first:],
            "completion_mask": known[:, first:].long(),
            "tool_mask": piece["mask"][:, first:],
            "advantages": piece["advantage"][:, first:],
            "old_per_token_logps": piece["old_logprobs"][:, first:],
            "ref_per_token_logps": piece["ref_logprobs"][:, first:],
            "num_items_in_batch": torch.tensor(self._count),
        }
        return self._trainer._compute_loss(self._trainer.model, inputs)


_FIELDS = ("ids", "mask", "advantage", "old_logprobs", "ref_logprobs")
