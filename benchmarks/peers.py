"""The peer: transformers on PyTorch with our weights, doing the same work.

Letters as in the model: B rows, T query positions, S key positions, K kv heads, H head dim, D width.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flax import nnx
from transformers import Qwen2ForCausalLM

from benchmarks.scripted import Work
from psearch_jax.config import DecoderConfig, LearningSection
from psearch_jax.models import hf
from psearch_jax.train.state import GRADIENT_CLIP
from psearch_jax.types import TrainBatch

TOKENIZER = Path(hf.__file__).resolve().parents[1] / "assets" / "toy_policy"  # an export needs one; it is not used


def torch_model(params: nnx.State, config: DecoderConfig, dtype: str = "float32") -> Qwen2ForCausalLM:
    """Our weights in transformers' model, through an export."""
    with tempfile.TemporaryDirectory() as folder:
        hf.save_hf(params, config, TOKENIZER, f"{folder}/model")
        loading = {"dtype": getattr(torch, dtype), "attn_implementation": "sdpa"}
        return Qwen2ForCausalLM.from_pretrained(f"{folder}/model", **loading).eval()


def logprobs_at(model: Any, ids: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """Log-probs [B, M] of the token ids [B, S] at positions `at` [B, M]; logits are computed only there."""
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
    before = hidden.gather(1, (at - 1)[..., None].expand(-1, -1, hidden.shape[-1]))
    logits = model.lm_head(before).float()
    chosen = ids.gather(1, at).flatten()
    return -torch.nn.functional.cross_entropy(logits.flatten(0, 1), chosen, reduction="none").view(at.shape)


def token_logprobs(model: Qwen2ForCausalLM, ids: np.ndarray) -> np.ndarray:
    """Log-probs of the tokens of one row [S] given the earlier ones; 0 for the first. [S] float32."""
    with torch.no_grad():
        logprobs = logprobs_at(model, torch.from_numpy(ids[None]).long(), torch.arange(1, len(ids))[None])[0]
    return torch.cat([torch.zeros(1), logprobs]).numpy()


class KeyValueCache:
    """Keys and values of rows of one length, written in place: transformers' own cache is copied at every token.

    transformers calls only `update`; `begin` sets the positions of the next forward pass.
    """

    def __init__(self, config: DecoderConfig, rows: int, positions: int, dtype: torch.dtype):
        shape = (config.layers, rows, config.kv_heads, positions, config.head_dim)
        self.k, self.v = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)

    def begin(self, start: int, T: int) -> torch.Tensor | None:
        """The next pass has T tokens from position `start` on. Returns the mask [1, 1, T, S]; None if it is causal."""
        self._start, self._end = start, start + T
        if start == 0 or T == 1:
            return None
        return (torch.arange(self._end) <= torch.arange(start, self._end)[:, None])[None, None]

    def update(self, k: torch.Tensor, v: torch.Tensor, layer: int, *_: Any, **__: Any) -> tuple[torch.Tensor, ...]:
        """Stores k, v [B, K, T, H] of one layer; returns those of all positions, [B, K, S, H]."""
        for stored, new in ((self.k[layer], k), (self.v[layer], v)):
            stored[:, :, self._start : self._end] = new
        return self.k[layer][:, :, : self._end], self.v[layer][:, :, : self._end]


class TorchRollouts:
    """Samples a `Work` whose rollouts have equal lengths, all at once, so that no row ever waits for another.

    The cache is kept over all turns, and a group's prompt is prefilled once.
    """

    def __init__(self, work: Work, config: DecoderConfig, model: Qwen2ForCausalLM):
        self._work, self._config, self._model = work, config, model
        self._prompts = torch.tensor(work.prompts(config.vocab_rows))
        rng = np.random.default_rng(2)
        shapes = [(len(work.scripts), n) for n in work.scripts[0].observations]
        self._observations = [torch.from_numpy(rng.integers(0, config.vocab_rows, shape)) for shape in shapes]

    @torch.inference_mode()
    def run(self) -> tuple[np.ndarray, np.ndarray]:
        """Token ids and log-probs [B, S]; the log-probs of tokens that were not sampled are 0."""
        work, config, dtype = self._work, self._config, self._model.dtype
        pool = KeyValueCache(config, len(self._prompts), work.prompt_tokens, dtype)
        hidden = self._forward(pool, self._prompts, 0).repeat_interleave(work.samples, 0)
        cache = KeyValueCache(config, len(work.scripts), work.longest, dtype)
        for stored, new in ((cache.k, pool.k), (cache.v, pool.v)):
            stored[:, :, :, : work.prompt_tokens] = new.repeat_interleave(work.samples, 1)
        ids = self._prompts.repeat_interleave(work.samples, 0)
        logprobs = torch.zeros(ids.shape)
        for turn, count in enumerate(work.scripts[0].turns):
            for i in range(count):
                scores = torch.log_softmax(self._model.lm_head(hidden).float(), dim=-1)
                token = torch.multinomial(scores.exp(), 1)
                ids, logprobs = torch.cat([ids, token], 1), torch.cat([logprobs, scores.gather(1, token)], 1)
                if i + 1 < count:
                    hidden = self._forward(cache, token, ids.shape[1] - 1)
            for new in self._observations[turn : turn + 1]:  # the last turn has none
                begin = ids.shape[1] - 1  # the turn's last token is not in the cache yet
                ids, logprobs = torch.cat([ids, new], 1), torch.cat([logprobs, torch.zeros(new.shape)], 1)
                hidden = self._forward(cache, ids[:, begin:], begin)
        return ids.numpy(), logprobs.numpy()

    def _forward(self, cache: KeyValueCache, ids: torch.Tensor, start: int) -> torch.Tensor:
        """Processes token ids [B, T] from position `start` on. Returns the last hidden states [B, D]."""
        out = self._model.model(
            attention_mask={"full_attention": cache.begin(start, ids.shape[1])},
            input_ids=ids,
            position_ids=torch.arange(start, start + ids.shape[1])[None],
            past_key_values=cache,
            use_cache=True,
        )
        return out.last_hidden_state[:, -1]


class TorchUpdate:
    """The same loss and optimizer step as ours, in micro-batches. `model` is changed in place."""

    FIELDS = ("ids", "mask", "advantage", "old_logprobs", "ref_logprobs")

    def __init__(self, model: Qwen2ForCausalLM, learning: LearningSection):
        self._model, self._learning, self._trained = model.train(), learning, list(model.parameters())
        betas = (0.9, 0.999)
        decay = {"weight_decay": learning.weight_decay, "fused": True}
        self._optimizer = torch.optim.AdamW(self._trained, learning.learning_rate, betas, **decay)

    def load(self, batch: TrainBatch) -> None:
        """Cuts a batch into micro-batches of rows of similar length for the next `run`."""
        order, self._micro_batches = np.argsort(batch.length, kind="stable"), []
        for i in range(0, len(order), self._learning.micro_batch_rows):
            rows = order[i : i + self._learning.micro_batch_rows]
            width = int(batch.length[rows].max())
            micro = {name: torch.from_numpy(np.asarray(getattr(batch, name))[rows, :width]) for name in self.FIELDS}
            micro["ids"], micro["mask"][:, 0] = micro["ids"].long(), 0  # the first token has no predecessor
            at = micro["mask"].argsort(dim=1, descending=True, stable=True)[:, : int(micro["mask"].sum(1).max())]
            self._micro_batches.append(micro | {"at": at.clamp(min=1), "real": micro["mask"].gather(1, at)})
        self._count = float(batch.mask[:, 1:].sum())

    def run(self) -> dict[str, float]:
        """One update. Returns the loss and the gradient norm."""
        self._optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for micro in self._micro_batches:
            loss = self._loss(micro)
            loss.backward()
            total += float(loss.detach())
        norm = torch.nn.utils.clip_grad_norm_(self._trained, GRADIENT_CLIP)
        self._optimizer.step()
        return {"loss": total, "gradient_norm": float(norm)}

    def _loss(self, micro: dict[str, torch.Tensor]) -> torch.Tensor:
        """The clipped objective with the k3 estimate of the KL term, divided by all sampled tokens of the batch."""
        learning, logp = self._learning, logprobs_at(self._model, micro["ids"], micro["at"])
        names = ("old_logprobs", "ref_logprobs", "advantage")
        old, ref, advantage = (micro[name].gather(1, micro["at"]) for name in names)
        ratio = torch.exp(logp - old)
        clipped = ratio.clamp(1 - learning.clip_low, 1 + learning.clip_high)
        kl = torch.exp(ref - logp) - (ref - logp) - 1
        value = torch.minimum(ratio * advantage, clipped * advantage) - learning.kl_coefficient * kl
        return -(value * micro["real"]).sum() / self._count
