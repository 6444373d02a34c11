"""A cross-encoder (BERT that scores query and passage together) that reranks another retriever's passages.

Nogueira and Cho, arXiv 1901.04085. A pair is encoded as one text, `[CLS] query [SEP] passage [SEP]`, whose longer part
is cut first. As in retrieval/encoders/encoder.py, a score does not depend on the rest of the batch.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from retrieval.encoders.bert import head_weights, load_bert
from retrieval.encoders.encoder import LENGTHS, Pace, batches, load_tokenizer, pace_of, weights_digest
from retrieval.protocol import CorpusError, Passage, Retriever, as_utf8, text_sha256

HEAD = {
    "pooler_kernel": "pooler.dense.weight",
    "pooler_bias": "pooler.dense.bias",
    "score_kernel": "classifier.weight",
    "score_bias": "classifier.bias",
}


class CrossEncoder:
    """Scores pairs with the weights of a Hugging Face directory (BertForSequenceClassification with one label)."""

    def __init__(self, directory: Path, max_tokens: int = LENGTHS[-1], pace: Pace | None = None):
        """Raises `CorpusError` when the directory contains no BERT, or not one with a single score."""
        pace = pace or pace_of(jax.local_devices()[0])
        self._bert = load_bert(directory, pace.dtype)
        self.identity = {"weights": weights_digest(directory), "max_tokens": max_tokens, "dtype": pace.dtype}
        self._tokenizer = load_tokenizer(directory, self._bert.config.vocab_rows)
        self._head = {name: jnp.asarray(value) for name, value in head_weights(directory, HEAD).items()}
        labels, width = self._head["score_kernel"].shape
        if labels != 1 or width != self._bert.config.width:
            raise CorpusError(
                f"{directory}: classifier.weight is {labels} x {width}, accepted: 1 x {self._bert.config.width}"
            )
        most = min(max_tokens, self._bert.config.positions)
        self._lengths = [n for n in LENGTHS if n < most] + [most]
        devices = jax.local_devices()
        mesh = Mesh(np.array(devices), ("data",))
        self._rows = -(-pace.passage_rows // len(devices)) * len(devices)
        self._place_rows = NamedSharding(mesh, PartitionSpec("data"))
        graph, state = nnx.split(self._bert)
        everywhere = NamedSharding(mesh, PartitionSpec())
        self._state, self._head = jax.device_put((state, self._head), everywhere)
        self._precision = "highest" if pace.dtype == "float32" else "default"

        def score(state: nnx.State, head: Any, ids: jax.Array, types: jax.Array, lengths: jax.Array) -> jax.Array:
            first = nnx.merge(graph, state)(ids, lengths, types)[:, 0].astype(jnp.float32)
            pooled = jnp.tanh(first @ head["pooler_kernel"].T + head["pooler_bias"])
            return (pooled @ head["score_kernel"].T + head["score_bias"])[:, 0]

        self._score = jax.jit(score)

    def scores(self, pairs: Sequence[tuple[str, Passage]]) -> np.ndarray:
        """[N] float32; a higher score means a more relevant passage."""
        out = np.zeros(len(pairs), np.float32)
        if not pairs:
            return out
        texts = [(as_utf8(query), as_utf8(f"{p.title}\n{p.text}" if p.title else p.text)) for query, p in pairs]
        encoded = self._tokenizer(
            [query for query, _ in texts],
            [passage for _, passage in texts],
            truncation="longest_first",
            max_length=self._lengths[-1],
            return_token_type_ids=True,
        )
        ids, types = encoded["input_ids"], encoded["token_type_ids"]
        for batch, width in batches(np.array([len(row) for row in ids], int), self._lengths, self._rows):
            padded, kinds = np.zeros((2, self._rows, width), np.int32)
            lengths = np.ones(self._rows, np.int32)  # padding rows attend to one token, which avoids NaN
            for row, pair in enumerate(batch):
                lengths[row] = len(ids[pair])
                padded[row, : lengths[row]], kinds[row, : lengths[row]] = ids[pair], types[pair]
            placed = jax.device_put((padded, kinds, lengths), self._place_rows)
            with jax.default_matmul_precision(self._precision):
                out[batch] = np.asarray(self._score(self._state, self._head, *placed))[: len(batch)]
        return out


class Reranked:
    """Implements `Retriever`: reranks another retriever's candidates with a cross-encoder."""

    def __init__(self, retriever: Retriever, encoder: CrossEncoder, candidates: int = 20):
        """`candidates`: passages scored per query; `search` uses its `k` if that is larger."""
        self._retriever, self._encoder, self._candidates = retriever, encoder, candidates
        self._lock = threading.Lock()  # one batch on the device at a time

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """As `Retriever.search`; scores are the cross-encoder's, and ties keep the candidates' order."""
        wanted = list(dict.fromkeys(queries))
        candidates = dict(zip(wanted, self._retriever.search(wanted, max(k, self._candidates)), strict=True))
        pairs = [(query, passage) for query in wanted for passage in candidates[query]]
        with self._lock:
            scores = iter(self._encoder.scores(pairs).round(4).tolist())
        ranked = {}
        for query in wanted:
            scored = [replace(passage, score=next(scores)) for passage in candidates[query]]
            ranked[query] = sorted(scored, key=lambda passage: -passage.score)[:k]
        return [list(ranked[query]) for query in queries]

    def describe(self) -> dict[str, Any]:
        """See `Retriever.describe`: that of the reranked retriever, with a ranking of its own."""
        description = self._retriever.describe()
        ranking = [description.get("ranking_sha256"), self._encoder.identity, self._candidates]
        return description | {"ranking_sha256": text_sha256(json.dumps(ranking))}
