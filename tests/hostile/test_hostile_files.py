"""Untrusted directories: whatever their files contain, they load or are refused in one line that names them.

`HOSTILE=100000` draws that number of examples, with new seeds (see test_hostile.py).
"""

import json
import math
from contextlib import contextmanager
from copy import deepcopy

import pytest
from bert_models import write_model
from helpers import one_device_mesh, random_params, tiny_config
from hypothesis import given, settings
from hypothesis import strategies as st
from test_hostile import COUNT, JSON, few

from psearch_jax.config import LearningSection
from psearch_jax.models import hf
from psearch_jax.text.tokenizer import Tokenizer
from psearch_jax.train.checkpointing import checkpoint
from psearch_jax.train.state import init_state, make_optimizer
from psearch_jax.types import UserError
from retrieval.encoders.encoder import BertEncoder
from retrieval.protocol import CorpusError, RetrievalError
from retrieval.service import RetrievalService

EDGES = [0, -1, 1, 3, 2**31, 10**30, math.nan, math.inf, True, None, "", "x", "../x", "/x", ".", [], [0], {}, {"x": 1}]


def paths(value, here=()):
    """The path of every entry inside a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [here + (key,) for key, _ in inner] + [p for key, part in inner for p in paths(part, here + (key,))]


def changed(value, data):
    """A copy of the value with one to three entries replaced or deleted."""
    value = json.loads(json.dumps(value))
    for _ in range(data.draw(st.integers(1, 3))):
        places = paths(value)
        if not places:
            break
        *way, last = data.draw(st.sampled_from(places))
        inner = value
        for key in way:
            inner = inner[key]
        if data.draw(st.booleans()):
            inner[last] = deepcopy(data.draw(st.sampled_from(EDGES) | JSON))
        else:
            del inner[last]
    return value


def damaged(file, data):
    """Damages a file in place: replaces or deletes fields of its JSON, or removes, replaces or inserts bytes."""
    content = file.read_bytes()
    if content[:1] == b"{" and data.draw(st.integers(0, 3)):
        file.write_text(json.dumps(changed(json.loads(content), data)))
        return
    place = data.draw(st.integers(0, max(0, min(len(content) - 1, 4096))))
    put = data.draw(st.binary(max_size=8))
    rest = content[place + data.draw(st.integers(0, 8)) :] if data.draw(st.booleans()) else b""
    file.write_bytes(content[:place] + put + rest)


@contextmanager
def changed_for_now(file, data, named=None):
    """Damages a file and restores it on exit; an error has to name the directory `named`, by default the file's."""
    original = file.read_bytes()
    damaged(file, data)
    try:
        yield
    except (UserError, CorpusError, RetrievalError) as error:
        text = str(error)
        assert "\n" not in text and str(named or file.parent) in text, text
    finally:
        file.write_bytes(original)


def one_of(folder, data):
    return folder / data.draw(st.sampled_from(sorted(p.name for p in folder.iterdir() if p.suffix != ".md")))


@pytest.mark.parametrize("load", [hf.load_hf, Tokenizer.load])
@few
@given(data=st.data())
def test_a_model_is_loaded_or_refused(tiny_policy, load, data):
    """A damaged model directory loads, or is refused in one line that names it."""
    with changed_for_now(one_of(tiny_policy, data), data):
        load(tiny_policy)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


@few
@given(data=st.data())
def test_an_encoder_is_loaded_or_refused(encoder, data):
    """A damaged encoder directory loads, or is refused in one line that names it."""
    with changed_for_now(one_of(encoder, data), data):
        BertEncoder.from_model(encoder)


@pytest.fixture(scope="module")
def step(tmp_path_factory):
    """The only checkpoint of a run."""
    directory = tmp_path_factory.mktemp("run")
    keeper = checkpoint.Checkpoints(directory / "checkpoints")
    config = tiny_config(64)
    state = init_state(random_params(config), make_optimizer(LearningSection(), 10), one_device_mesh())
    keeper.save(1, state, {"model": checkpoint.model_record(config), "tokenizer": "x", "lora": None})
    keeper.close()
    return directory / "checkpoints" / "1"


@settings(few, max_examples=max(15, COUNT // 50))  # Orbax takes a second or two per example
@given(data=st.data())
def test_a_checkpoint_is_loaded_or_refused(step, data):
    """A checkpoint with a damaged record loads, or is refused in one line that names it."""
    with changed_for_now(step / "loop" / "metadata", data, step):
        checkpoint.load_params(step)


@few
@given(data=st.data())
def test_an_index_is_opened_or_refused(index, data):
    """An index with a damaged manifest opens, or is refused in one line that names it."""
    with changed_for_now(index / "manifest.json", data):
        RetrievalService.open(index).search(["Ada Lovelace born"], 2)
