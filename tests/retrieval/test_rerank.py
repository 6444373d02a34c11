"""The cross-encoder compared with transformers, in any batch, and as a re-ranker of a retriever's candidates."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from bert_models import WORDS, write_model
from helpers import people
from safetensors.numpy import load_file, save_file

from retrieval.encoders.encoder import CPU
from retrieval.protocol import CorpusError, Passage
from retrieval.ranking.rerank import CrossEncoder, Reranked
from retrieval.service import RetrievalService


def write_cross_encoder(folder: Path, labels: int = 1) -> Path:
    """A small BERT with a pooler and a score head, stored as BertForSequenceClassification does."""
    write_model(folder, prefix="bert.")
    rng = np.random.default_rng(1)
    shapes = {"bert.pooler.dense.weight": (48, 48), "bert.pooler.dense.bias": (48,)}
    shapes |= {"classifier.weight": (labels, 48), "classifier.bias": (labels,)}
    head = {name: rng.standard_normal(shape).astype(np.float32) * 0.3 for name, shape in shapes.items()}
    save_file({**load_file(folder / "model.safetensors"), **head}, folder / "model.safetensors")
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"num_labels": labels, "architectures": ["x"]}))
    return folder


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    return write_cross_encoder(tmp_path_factory.mktemp("models") / "cross")


@pytest.fixture(scope="module")
def encoder(directory) -> CrossEncoder:
    return CrossEncoder(directory)


def pairs(count: int = 40) -> list[tuple[str, Passage]]:
    rng = np.random.default_rng(0)

    def words(most: int) -> str:
        return " ".join(rng.choice(WORDS, rng.integers(1, most)))

    return [(words(12), Passage(str(i), words(4) if i % 3 else "", words(90))) for i in range(count)]


def test_random_weights_equal_torch(directory, encoder):
    """Wrong token types, a missing pooler, or truncation in the wrong place: all of them still give numbers."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    model = transformers.BertForSequenceClassification.from_pretrained(directory, num_labels=1).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    wanted = []
    with torch.no_grad():
        for query, p in pairs():
            text = f"{p.title}\n{p.text}" if p.title else p.text
            inputs = tokenizer(
                query, text, truncation="longest_first", max_length=64, return_tensors="pt", return_token_type_ids=True
            )
            wanted.append(float(model(**inputs).logits[0, 0]))
    ours = encoder.scores(pairs())
    assert np.std(wanted) > 0.01 and np.abs(ours - wanted).max() < 1e-5


def test_a_pair_scores_alike_in_any_company(encoder):
    """A replayed search must agree with the first one, whatever else is in the batch."""
    together = encoder.scores(pairs())
    alone = [encoder.scores([pair])[0] for pair in pairs()]
    np.testing.assert_array_equal(together, alone)
    assert len(encoder.scores([])) == 0


def test_the_order_is_the_cross_encoders_among_more_candidates(encoder):
    """Re-ranking only the requested number of candidates, or giving a query the passages of another one."""
    service = RetrievalService.from_corpus(people())
    reranked = Reranked(service, encoder, 12)
    queries = ["Baro Quill born", "", "Zora Crane", "Baro Quill born", "\ud800"]
    rankings = reranked.search(queries, 3)
    for query, ranking in zip(queries, rankings, strict=True):
        candidates = service.search([query], 12)[0]
        scores = dict(zip((p.id for p in candidates), encoder.scores([(query, p) for p in candidates]), strict=True))
        best = sorted(candidates, key=lambda p: -round(float(scores[p.id]), 4))[:3]
        assert [p.id for p in ranking] == [p.id for p in best]
        assert all(abs(p.score - scores[p.id]) < 1e-3 for p in ranking)
    assert rankings[0] == rankings[3] and rankings[1] == [] and len(rankings[0]) == 3
    assert [p.id for p in rankings[0]] != [p.id for p in service.search(queries[:1], 3)[0]], "same order"
    assert len(reranked.search(queries[:1], 20)[0]) == 20
    digests = {r.describe()["ranking_sha256"] for r in (service, reranked, Reranked(service, encoder, 13))}
    assert len(digests) == 3, "evaluations with different rankings would count as the same"
    assert reranked.describe() | {"ranking_sha256": ""} == service.describe() | {"ranking_sha256": ""}


def test_directories_that_give_no_score_are_refused(tmp_path, directory):
    """A sentence encoder, or a classifier with three labels, would rank by noise."""
    three = write_cross_encoder(tmp_path / "three", labels=3)
    with pytest.raises(CorpusError, match="3 x 48, accepted: 1 x 48"):
        CrossEncoder(three)
    plain = write_model(tmp_path / "plain")
    with pytest.raises(CorpusError, match="pooler.dense.weight is missing"):
        CrossEncoder(plain)
    shutil.copytree(directory, tmp_path / "foreign")
    (tmp_path / "foreign" / "vocab.txt").write_text("\n".join(f"w{i}" for i in range(500)))
    with pytest.raises(CorpusError, match="the tokenizer has"):
        CrossEncoder(tmp_path / "foreign", pace=CPU)
