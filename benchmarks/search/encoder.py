"""The BERT encoder compared with transformers' BertModel in eager PyTorch: same weights, sentences and cores."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

BATCHES = (16, 32, 64)  # batch sizes of PyTorch; the fastest counts


def measure(model: str | None, sentences: int, log: Callable[[str], None]) -> list[dict[str, Any]]:
    """Sentences per second of both, for short queries and passages, and the largest difference of their vectors."""
    import torch
    from transformers import AutoTokenizer, BertModel

    from retrieval.encoders.encoder import BertEncoder

    with tempfile.TemporaryDirectory() as folder:
        directory = Path(model) if model else random_minilm(Path(folder))
        ours = BertEncoder.from_model(directory, query_prefix="", passage_prefix="")
        theirs = BertModel.from_pretrained(directory, attn_implementation="eager").eval()
        tokenizer = AutoTokenizer.from_pretrained(directory)

        def encode(texts: list[str], size: int = BATCHES[0]) -> np.ndarray:
            out = np.empty((len(texts), theirs.config.hidden_size), np.float32)
            order = np.argsort([len(text) for text in texts], kind="stable")
            for start in range(0, len(texts), size):
                rows = order[start : start + size]
                batch = tokenizer(
                    [texts[row] for row in rows], padding=True, truncation=True, max_length=256, return_tensors="pt"
                )
                mask = batch["attention_mask"][..., None].float()
                hidden = theirs(**batch).last_hidden_state
                pooled = (hidden * mask).sum(1) / mask.sum(1)
                out[rows] = torch.nn.functional.normalize(pooled, dim=1).numpy()
            return out

        lines = []
        for name, least, most in (("queries of 4 to 16 words", 4, 16), ("passages of 60 to 120 words", 60, 120)):
            texts = _texts(tokenizer, sentences, least, most)
            with torch.no_grad():
                difference = float(np.abs(encode(texts) - ours.encode_queries(texts)).max())
                seconds = {
                    "torch": min(_seconds(lambda t, n=size: encode(t, n), texts) for size in BATCHES),
                    "jax": _seconds(ours.encode_queries, texts),
                }
            lines.append(
                {
                    "texts": name,
                    "torch_per_s": round(sentences / seconds["torch"], 1),
                    "jax_per_s": round(sentences / seconds["jax"], 1),
                    "ratio": round(seconds["torch"] / seconds["jax"], 2),
                    "max_difference": float(f"{difference:.1e}"),
                }
            )
            log(str(lines[-1]))
    return lines


def random_minilm(folder: Path) -> Path:
    """A directory with random weights in the shape of MiniLM-L6 and a vocabulary of made-up words."""
    import torch
    from transformers import BertConfig, BertModel, BertTokenizerFast

    letters = list("abcdefghijklmnopqrstuvwxyz")
    pairs = [a + b for a in letters for b in letters]
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *pairs, *(f"##{p}" for p in letters + pairs)]
    (folder / "vocab.txt").write_text("\n".join(vocabulary), encoding="utf-8")
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=384,
        num_hidden_layers=6,
        num_attention_heads=12,
        intermediate_size=1536,
    )
    BertModel(config).save_pretrained(folder)
    BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    return folder


def _texts(tokenizer: Any, count: int, least: int, most: int) -> list[str]:
    rng = np.random.default_rng(0)
    words = sorted(word for word in tokenizer.get_vocab() if word.isalpha() and word.isascii() and len(word) > 1)
    return [" ".join(rng.choice(words, rng.integers(least, most + 1))) for _ in range(count)]


def _seconds(encode: Callable[[list[str]], Any], texts: list[str]) -> float:
    """The best of three."""
    times = []
    for _ in range(3):
        start = time.perf_counter()
        encode(texts)
        times.append(time.perf_counter() - start)
    return min(times)
