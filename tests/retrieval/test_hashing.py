"""The hashing encoder, which has no learned weights."""

import json

import numpy as np
import pytest
from helpers import people

from retrieval.encoders.hashing import HashingEncoder
from retrieval.protocol import CorpusError, Passage


def test_encoder_rows_do_not_depend_on_the_batch():
    """A vector does not depend on the rest of its batch."""
    encoder = HashingEncoder(128).fit(people())
    texts = [p.text for p in people()]
    together = encoder.encode_queries(texts)
    alone = np.concatenate([encoder.encode_queries([text]) for text in texts])
    assert np.array_equal(together, alone)
    assert np.allclose(np.linalg.norm(together, axis=1), 1, atol=1e-6)


def test_encoder_texts_that_say_nothing():
    """Empty, unknown or unprintable text gets a zero vector."""
    encoder = HashingEncoder(64).fit(people())
    vectors = encoder.encode_queries(["", "?!", "zzyzx", "\ud800\x00"])
    assert vectors.shape == (4, 64) and not vectors.any()
    assert encoder.encode_queries([]).shape == (0, 64)
    assert not encoder.encode_passages([Passage("1", "", "...")]).any()


def test_encoder_identity_pins_the_vectors(tmp_path):
    """Encoders with different vectors have different identities, and only that of the index is loaded."""
    plain, fitted = HashingEncoder(64), HashingEncoder(64).fit(people())
    others = [fitted, HashingEncoder(64, seed=1), HashingEncoder(65), HashingEncoder(64).fit(people()[:9])]
    assert all(plain.identity != other.identity for other in others)
    fitted.save(tmp_path)
    loaded = HashingEncoder.load(tmp_path, json.loads(json.dumps(fitted.identity)))
    assert np.array_equal(loaded.encode_passages(people()), fitted.encode_passages(people()))
    for identity in (plain.identity, {}, fitted.identity | {"version": 0}):
        with pytest.raises(CorpusError, match="encoder_weights.npy"):
            HashingEncoder.load(tmp_path, identity)
