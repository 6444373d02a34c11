"""Small BERT models with random weights, and sentences for them."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from retrieval.encoders.bert import LAYER_WEIGHTS, WEIGHTS, BertConfig, weight_shapes

WORDS = "when was the of in born baro quill lena wend zora crane river stone to be field marsh who is and".split()


def write_model(folder: Path, prefix: str = "") -> Path:
    """A small BERT with random weights, biases and norms, as a Hugging Face directory."""
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS, *"abcdefghijklmnopqrstuvwxyz", "##s", "##a"]
    config = BertConfig(len(vocabulary), 48, 3, 4, 96, 64, 2, 1e-12)
    rng = np.random.default_rng(0)
    arrays = {
        name: rng.standard_normal(shape).astype(np.float32) * 0.2 for name, shape in weight_shapes(config).items()
    }
    tensors = {name: arrays[ours] for ours, (_, name, *_) in WEIGHTS.items() if ours not in LAYER_WEIGHTS}
    for ours in LAYER_WEIGHTS:
        _, *names = WEIGHTS[ours]
        for i in range(config.layers):
            for name, part in zip(names, np.split(arrays[ours][i], len(names), axis=-1), strict=True):
                tensors[f"encoder.layer.{i}.{name}"] = np.ascontiguousarray(part.T)
    folder.mkdir(parents=True)
    save_file({prefix + name: value for name, value in tensors.items()}, folder / "model.safetensors")
    raw = {
        "model_type": "bert",
        "vocab_size": config.vocab_rows,
        "hidden_size": config.width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "intermediate_size": config.mlp,
        "max_position_embeddings": config.positions,
        "type_vocab_size": config.types,
        "hidden_act": "gelu",
    }
    (folder / "config.json").write_text(json.dumps(raw))
    (folder / "vocab.txt").write_text("\n".join(vocabulary))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer", "do_lower_case": true}')
    return folder


def texts(count: int = 40) -> list[str]:
    rng = np.random.default_rng(0)
    return [" ".join(rng.choice(WORDS, rng.integers(1, 90))) for _ in range(count)]  # the longest are truncated
