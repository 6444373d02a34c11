"""A BERT-family sentence encoder (E5, BGE, MiniLM) as an `Encoder`: mean or first-token pooling, unit length.

Texts are grouped into buckets by length, and every batch of a bucket has the same number of rows. So few programs are
compiled, and the vector of a text does not depend on the rest of its batch. Queries have one batch size and passages
another, whatever their number: different batch sizes give vectors that differ in the last bits. The rows are spread
over this process's devices.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from retrieval.encoders.bert import load_bert, read_config, weight_files
from retrieval.protocol import CorpusError, Passage, as_utf8, read_object

VERSION = 1  # raise it with any change to the vectors: older indexes are then refused
# Tokens per text, special ones included: small steps at common lengths, for little padding.
LENGTHS = (8, 12, 16, 24, 32, 40, 48, 56, *range(64, 256, 16), *range(256, 513, 64))
LEAST_CAPABILITY = 8.0  # the lowest NVIDIA compute capability with bfloat16 matrix products
FOLDER = "encoder_model"  # in an index directory
FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt")
MODULES = ("Transformer", "Pooling", "Normalize")  # of sentence-transformers
POOLING = Path("1_Pooling") / "config.json"
LENGTH_FILE = "sentence_bert_config.json"
# The prefixes of queries and passages, by a part of the model's name. E5: Wang et al. 2022; BGE: Xiao et al. 2023,
# section 4.
PREFIXES = {"e5": ("query: ", "passage: "), "bge": ("Represent this sentence for searching relevant passages: ", "")}


class Pace(NamedTuple):
    """Batch sizes and dtype for a kind of device."""

    query_rows: int  # queries per batch
    passage_rows: int  # passages per batch
    block_rows: int  # passages to sort by length at a time
    dtype: str  # default dtype of the layers


# Larger batches are slower on a CPU. On an accelerator, a batch of passages fills the device. Query batches are
# smaller, as a few queries spread over three or four buckets would be mostly padding. The last batch of each bucket of
# a block is half empty on average. With blocks of 4,096 passages that adds half to the work, with 65,536 nothing.
CPU = Pace(16, 16, 4096, "float32")
ACCELERATOR = Pace(32, 128, 65536, "bfloat16")


def pace_of(device: Any) -> Pace:
    """The pace of a jax.Device. GPUs without bfloat16, such as the T4, compute in float32."""
    if device.platform == "cpu":
        return CPU
    capability = float(getattr(device, "compute_capability", None) or LEAST_CAPABILITY)  # a TPU has none
    return ACCELERATOR if capability >= LEAST_CAPABILITY else ACCELERATOR._replace(dtype="float32")


class BertEncoder:
    """Implements `Encoder` with the weights of a Hugging Face directory."""

    name = "bert"

    def __init__(self, directory: Path, settings: dict[str, Any], pace: Pace | None = None):
        """`settings`: the identity without `dimensions` and `weights`; `from_model` explains the fields."""
        self._directory, self._settings = directory, settings
        self._model = load_bert(directory, settings["dtype"])
        self._weights = _digest_weights(directory)
        self._tokenizer = _load_tokenizer(directory, self._model.config.vocab_rows)
        self._lengths = [n for n in LENGTHS if n < settings["max_tokens"]] + [settings["max_tokens"]]
        devices = jax.local_devices()
        mesh = Mesh(np.array(devices), ("data",))
        pace = pace or pace_of(devices[0])
        self._query_rows, self._passage_rows = (
            -(-rows // len(devices)) * len(devices) for rows in (pace.query_rows, pace.passage_rows)
        )
        self.block_rows = pace.block_rows  # of passages, see `Encoder`
        self._row_sharding = NamedSharding(mesh, PartitionSpec("data"))
        graphdef, state = nnx.split(self._model)
        self._state = jax.device_put(state, NamedSharding(mesh, PartitionSpec()))

        def encode(state: nnx.State, ids: jax.Array, lengths: jax.Array) -> jax.Array:
            return _embed(nnx.merge(graphdef, state), ids, lengths, settings["pooling"])

        self._encode = jax.jit(encode)

    @classmethod
    def from_model(
        cls,
        directory: str | Path,
        *,
        query_prefix: str | None = None,
        passage_prefix: str | None = None,
        dtype: str | None = None,
        pace: Pace | None = None,
    ) -> BertEncoder:
        """Open a sentence encoder's directory.

        Args:
          query_prefix, passage_prefix: put before every text; None: by the model's name (E5, BGE), otherwise "".
          dtype: float32 or bfloat16 for the layers; pooling and norms stay float32. None: that of `pace`.
          pace: None: that of this process's devices.

        Raises:
          CorpusError: the directory contains no BERT encoder, or its pooling is not supported.
        """
        directory = Path(directory)
        if not directory.is_dir():
            raise CorpusError(f"{directory}: no such directory; accepted: hashing, bm25 or a BERT encoder's directory")
        _refuse_other_modules(directory)
        name = _model_name(directory)
        words = re.split(r"[^a-z0-9]+", name.lower())  # not "lr2e5", which ends the names of many runs
        query, passage = next((v for part, v in PREFIXES.items() if part in words), ("", ""))
        positions = read_config(directory / "config.json").positions
        length = _read_if_exists(directory / LENGTH_FILE).get("max_seq_length") or LENGTHS[-1]
        if not isinstance(length, int) or length < 3:
            raise CorpusError(f"{directory / LENGTH_FILE}: max_seq_length is {length!r}, accepted: an integer above 2")
        settings = {
            "name": cls.name,
            "version": VERSION,
            "model": name,
            "pooling": _read_pooling(directory),
            "query_prefix": query if query_prefix is None else query_prefix,
            "passage_prefix": passage if passage_prefix is None else passage_prefix,
            "max_tokens": min(length, positions),
            "dtype": dtype or (pace or pace_of(jax.local_devices()[0])).dtype,
        }
        return cls(directory, settings, pace)

    @property
    def identity(self) -> dict[str, Any]:
        """The settings that determine the vectors, as JSON values."""
        return self._settings | {"dimensions": self.dimensions, "weights": self._weights}

    @property
    def dimensions(self) -> int:
        """D, the width of a vector."""
        return self._model.config.width

    def encode_queries(self, queries: Sequence[str]) -> np.ndarray:
        """Return [Q, D] float32 of unit length; a zero row for a query without text."""
        return self._encode_texts(queries, self._settings["query_prefix"], self._query_rows)

    def encode_passages(self, passages: Sequence[Passage]) -> np.ndarray:
        """Return [N, D] float32 of unit length; a title is encoded in quotes on its own line, as in wiki-18."""
        texts = [f'"{p.title}"\n{p.text}' if p.title else p.text for p in passages]
        return self._encode_texts(texts, self._settings["passage_prefix"], self._passage_rows)

    def save(self, directory: Path) -> None:
        """Copy the model's files into an index directory, and what a hub snapshot's symbolic links point to."""
        target = Path(directory) / FOLDER
        target.mkdir(exist_ok=True)
        for path in [self._directory / name for name in FILES] + weight_files(self._directory):
            if path.is_file():
                shutil.copyfile(path, target / path.name)

    @classmethod
    def load(cls, directory: Path, identity: dict[str, Any]) -> BertEncoder:
        """Read an encoder saved in `directory`. Raises `CorpusError` when it is not the one of `identity`."""
        folder = Path(directory) / FOLDER
        settings = {key: value for key, value in identity.items() if key not in ("dimensions", "weights")}
        try:
            encoder = cls(folder, settings)
        except (KeyError, TypeError) as error:
            raise CorpusError(f"{folder}: the index's encoder lacks {error}; build the index again") from None
        if encoder.identity != identity or settings.get("version") != VERSION:
            raise CorpusError(f"{folder}: encoder {encoder.identity} is not the index's {identity}; build it again")
        return encoder

    def _encode_texts(self, texts: Sequence[str], prefix: str, batch_rows: int) -> np.ndarray:
        out = np.zeros((len(texts), self.dimensions), np.float32)
        nonempty = np.array([row for row, text in enumerate(texts) if text.strip()], int)
        ids = self._tokenize([prefix + texts[int(row)] for row in nonempty])
        # All are dispatched before the first is read back, so that the device does not wait for the host.
        pending = [
            (batch, self._dispatch([ids[row] for row in batch], batch_rows, length))
            for batch, length in batches(np.array([len(row) for row in ids], int), self._lengths, batch_rows)
        ]
        for batch, vectors in pending:
            out[nonempty[batch]] = np.asarray(vectors)[: len(batch)]
        return out

    def _tokenize(self, texts: list[str]) -> list[np.ndarray]:
        """The token ids of each text, cut to the longest bucket."""
        if not texts:
            return []
        rows = self._tokenizer([as_utf8(text) for text in texts], truncation=True, max_length=self._lengths[-1])
        return [np.array(row, np.int32) for row in rows["input_ids"]]

    def _dispatch(self, ids: list[np.ndarray], rows: int, length: int) -> jax.Array:
        padded = np.zeros((rows, length), np.int32)
        lengths = np.ones(rows, np.int32)  # padding rows attend to one token, which avoids NaN
        for row, tokens in enumerate(ids):
            padded[row, : len(tokens)] = tokens
            lengths[row] = len(tokens)
        padded, lengths = jax.device_put((padded, lengths), self._row_sharding)
        with jax.default_matmul_precision("highest" if self._settings["dtype"] == "float32" else "default"):
            return self._encode(self._state, padded, lengths)


def _load_tokenizer(directory: Path, vocab_rows: int) -> Any:
    """Load the tokenizer of a model's directory. Raises `CorpusError` if it is unreadable or larger than the model."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)  # None would ask at the terminal
    except Exception as error:  # for a damaged file the tokenizers library raises a bare Exception
        reason = str(error).strip().split("\n")[0]
        raise CorpusError(f"{directory}: the tokenizer cannot be read ({reason})") from None
    if len(tokenizer) > vocab_rows:
        raise CorpusError(
            f"{directory}: the tokenizer has {len(tokenizer)} token ids, the model {vocab_rows} embedding rows"
        )
    return tokenizer


def batches(lengths: np.ndarray, widths: Sequence[int], rows: int) -> Iterator[tuple[np.ndarray, int]]:
    """Group texts of `lengths` [N] into batches of at most `rows`: yields their indices and the first width that fits.

    Args:
      widths: the lengths of the buckets, ascending.
    """
    buckets = np.searchsorted(widths, lengths)
    for bucket in np.unique(buckets):
        members = np.flatnonzero(buckets == bucket)
        for start in range(0, len(members), rows):
            yield members[start : start + rows], widths[bucket]


def _embed(model: Any, ids: jax.Array, lengths: jax.Array, pooling: str) -> jax.Array:
    """Token ids [B, T] and lengths [B] -> [B, D] float32 of unit length."""
    hidden = model(ids, lengths).astype(jnp.float32)
    if pooling == "cls":
        pooled = hidden[:, 0]
    else:
        mask = (jnp.arange(ids.shape[1]) < lengths[:, None])[..., None]
        pooled = jnp.where(mask, hidden, 0).sum(1) / lengths[:, None]
    return pooled / jnp.maximum(jnp.linalg.norm(pooled, axis=1, keepdims=True), 1e-12)


def _refuse_other_modules(directory: Path) -> None:
    """Raises `CorpusError` for a sentence-transformers model with a module that this encoder would leave out."""
    path = directory / "modules.json"
    try:
        entries = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
        modules = [str(entry["type"]).rpartition(".")[2] for entry in entries]
    except (ValueError, RecursionError, TypeError, KeyError) as error:
        raise CorpusError(f"{path}: cannot be read ({error}), accepted: a list of modules with types") from None
    if others := [module for module in modules if module not in MODULES]:
        raise CorpusError(f"{path}: has a module {others[0]}, accepted: {', '.join(MODULES)}")


def _read_pooling(directory: Path) -> str:
    """Either "mean" (the default) or "cls". Raises `CorpusError` for any other pooling."""
    path = directory / POOLING
    raw = _read_if_exists(path)
    modes = {
        key.removeprefix("pooling_mode_") for key, value in raw.items() if key.startswith("pooling_mode_") and value
    }
    names = {frozenset(): "mean", frozenset({"mean_tokens"}): "mean", frozenset({"cls_token"}): "cls"}
    if frozenset(modes) not in names:
        raise CorpusError(f"{path}: pools by {', '.join(sorted(modes))}, accepted: mean_tokens or cls_token, not both")
    return names[frozenset(modes)]


def _model_name(directory: Path) -> str:
    """The directory's name; for a hub snapshot, whose directory name is a hash, the name of the hub's model."""
    resolved = directory.resolve()
    if resolved.parent.name == "snapshots":
        return resolved.parent.parent.name.removeprefix("models--").replace("--", "/")
    return resolved.name


def _read_if_exists(path: Path) -> dict[str, Any]:
    """The JSON object in a file, or {} if the file does not exist."""
    return read_object(path) if path.is_file() else {}


def _digest_weights(directory: Path) -> str:
    """A digest of a model directory's weights."""
    digest = hashlib.sha256()
    for path in weight_files(directory):
        with open(path, "rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:16]
