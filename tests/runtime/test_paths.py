"""Run directories, evaluations, exports and questions on an object store: real clients, emulated store."""

import contextlib
import functools
import json
import os
import sys
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from gcp_storage_emulator.exceptions import NotFound
from gcp_storage_emulator.handlers import objects
from gcp_storage_emulator.server import create_server
from programs import completed
from runs import free_port, small_config

from psearch_jax.assembly import build
from psearch_jax.assembly.checks import missing_inputs
from psearch_jax.config import Config, from_mapping
from psearch_jax.data.prepared import PreparedQuestions, prepare
from psearch_jax.models import hf
from psearch_jax.runtime.metrics import MetricsWriter, cut_jsonl
from psearch_jax.runtime.paths import locate, make_writable, write_atomically
from psearch_jax.train import trainer
from psearch_jax.train.checkpointing import checkpoint
from psearch_jax.types import UserError
from retrieval.corpus import MemoryMappedCorpus
from retrieval.indexing.directory import open_index
from retrieval.protocol import CorpusError


def with_generation(download, request, response, storage, *args, **kwargs):
    """Adds the object's generation to a download as the real store does: TensorStore needs it to rewrite a file."""
    name = request.params["bucket_name"], request.params["object_id"]
    with contextlib.suppress(NotFound):
        response["x-goog-generation"] = storage.get_file_obj(*name)["generation"]
    return download(request, response, storage, *args, **kwargs)


@pytest.fixture(scope="module")
def bucket():
    """The address of an empty bucket, with gcsfs and TensorStore set up to use it."""
    port = free_port()
    server = create_server("127.0.0.1", port, in_memory=True, default_bucket="bucket")
    server.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(objects, "download", functools.partial(with_generation, objects.download))
        for name in ("STORAGE_EMULATOR_HOST", "TENSORSTORE_GCS_HTTP_URL"):
            patch.setenv(name, f"http://127.0.0.1:{port}")
        yield "gs://bucket"
    server.stop()


@pytest.fixture(autouse=True)
def nothing_local(tmp_path, monkeypatch):
    """No test may create a local directory called `gs:`."""
    monkeypatch.chdir(tmp_path)
    yield
    assert not (tmp_path / "gs:").exists()


def jsonl(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_a_run_lives_and_resumes_on_an_object_store(bucket, tiny_policy, tmp_path):
    """A run on gs:// writes all its files there, resumes from them, and can be exported there and loaded."""
    workdir = f"{bucket}/runs/one"
    fields = {"eval.questions_per_kind": 0, "train.checkpoint_every_steps": 1, "train.steps": 1}
    parts = build.training_run(small_config(tiny_policy, **fields))
    trainer.train(parts, workdir)
    # A restart that reuses the compiled programs; everything else comes from the store.
    parts.config = replace(parts.config, train=replace(parts.config.train, steps=2))
    parts.state = jax.tree.map(jnp.zeros_like, parts.state)
    summary = trainer.train(parts, workdir)
    place = locate(workdir)
    names = {"config.json", "metrics.jsonl", "tensorboard", "trajectories", "checkpoints", "summary.json"}
    assert {path.name for path in place.iterdir()} == names
    assert [row["step"] for row in jsonl(place / "metrics.jsonl")] == [0, 1]
    assert sorted(path.name for path in (place / "trajectories").iterdir()) == ["000000.jsonl", "000001.jsonl"]
    assert jsonl(place / "trajectories" / "000001.jsonl")[0]["step"] == 1
    assert json.loads((place / "summary.json").read_text())["steps"] == 2 == summary["steps"]
    assert len(list((place / "tensorboard").iterdir())) == 2  # one event file per start
    assert [path.name for path in checkpoint.find_checkpoints(workdir)] == ["2", "1"]
    mark = place / "checkpoints" / "2" / "commit_success.txt"
    content = mark.read_bytes()
    mark.unlink()  # as if the machine had been lost during the write
    assert [path.name for path in checkpoint.find_checkpoints(workdir)] == ["1"]
    mark.write_bytes(content)

    model, params, loop = checkpoint.load_params(workdir)
    same = jax.tree.map(lambda a, b: bool(np.array_equal(a, b)), params, parts.state.params)
    assert all(jax.tree.leaves(same)) and loop["step"] == 2
    hf.save_hf(params, model, tiny_policy, f"{bucket}/export", shard_bytes=40_000)
    with pytest.raises(UserError, match="gs://bucket/export: exists already"):
        hf.save_hf(params, model, tiny_policy, f"{bucket}/export")
    (tmp_path / "copy").mkdir()
    for file in locate(f"{bucket}/export").iterdir():
        (tmp_path / "copy" / file.name).write_bytes(file.read_bytes())
    config, exported = hf.load_hf(tmp_path / "copy")
    assert config == model and len(list((tmp_path / "copy").glob("*.safetensors"))) > 1
    for path, value in nnx.to_flat_state(exported):
        assert np.array_equal(value.get_value(), dict(nnx.to_flat_state(params))[path].get_value()), path


def test_metrics_are_put_whole(bucket, monkeypatch):
    """Rows are uploaded at intervals and before checkpoints, and a restart appends to them."""
    place = locate(f"{bucket}/metrics")
    writer = MetricsWriter(place, active=True)
    for step in range(3):
        writer.write(step, {"loss": 1.0})
    assert [row["step"] for row in jsonl(place / "metrics.jsonl")] == [0]
    writer.flush()  # as before every checkpoint
    assert [row["step"] for row in jsonl(place / "metrics.jsonl")] == [0, 1, 2]
    monkeypatch.setattr("psearch_jax.runtime.metrics.PUT_S", 0.0)
    writer.write(3, {"loss": 1.0})
    assert len(jsonl(place / "metrics.jsonl")) == 4
    writer.close()
    again = MetricsWriter(place, active=True)
    again.write(4, {"loss": 1.0})
    again.close()
    assert [row["step"] for row in jsonl(place / "metrics.jsonl")] == [0, 1, 2, 3, 4]
    assert len(list((place / "tensorboard").iterdir())) == 2


def test_what_is_mapped_into_memory_has_to_be_local(bucket, tmp_path):
    """Files that are memory-mapped must be on a disk; the message says so."""
    there = f"{bucket}/index"
    write_atomically(locate(there) / "manifest.json", "{}")
    words = "is not a path of this machine, accepted: a copy on a disk, whose files can be memory-mapped"
    for refused in (
        lambda: open_index(there),
        lambda: MemoryMappedCorpus(Path(f"{there}/c.jsonl")),  # pathlib writes gs:/
        lambda: prepare([("nq", str(tmp_path / "c.jsonl"))], f"{bucket}/set"),
        lambda: PreparedQuestions(there),
    ):
        with pytest.raises((CorpusError, UserError), match=words):
            refused()
    fields = {"model": {"path": there, "tokenizer": there}, "retrieval": {"index": there, "corpus": there}}
    needs = missing_inputs(from_mapping(fields | {"data": {"source": f"{there}/manifest.json"}}))
    named = ["model.path", "model.tokenizer", "retrieval.index", "retrieval.corpus"]
    assert [need.partition("=")[0] for need in needs] == [f"config.{field}" for field in named]
    assert all(words in need and "gcloud storage cp -r" in need for need in needs)


def test_rows_that_are_no_rows_do_not_stop_a_resume(tmp_path):
    """Damaged lines of metrics are dropped on resume."""
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(b'{"step": 0}\n5\n{"a": 1}\n\xff\n{"step": 1, "q": "\xc3\xa9"}\n{"step": 2}\n{"st')
    assert cut_jsonl(file, 2) == 1
    assert file.read_bytes() == b'{"step": 0}\n{"step": 1, "q": "\xc3\xa9"}\n'


def test_a_store_that_refuses_is_named_in_one_line():
    """A bucket without access ends a program in one line."""

    class Closed(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_error(403)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Closed)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    environment = {**os.environ, "STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{server.server_address[1]}"}
    done = completed(["launch/report.py", "gs://private/run"], env=environment)
    server.shutdown()
    assert done.returncode == 2 and done.stderr.startswith("report: gs://: cannot be reached, read or written (")
    assert len(done.stderr.splitlines()) == 1, done.stderr


def test_other_addresses_are_refused(bucket, tmp_path, monkeypatch):
    """Other remote addresses, a missing bucket and a missing library are refused in one line."""
    with pytest.raises(UserError, match="^s3://bucket/run: accepted: a path on this machine, or gs://BUCKET"):
        locate("s3://bucket/run")
    with pytest.raises(UserError, match="^gs:/bucket/run: accepted"):
        locate(Path("gs://bucket/run"))
    with pytest.raises(OSError, match="absent"):
        make_writable("gs://absent/run")
    config = Config()
    config = replace(config, data=replace(config.data, source=f"{bucket}/no.jsonl"))
    assert any(need == f"config.data.source={bucket}/no.jsonl: not found" for need in missing_inputs(config))
    config = replace(config, data=replace(config.data, source="tfds:natural_questions_open:train"))
    assert not any("data.source" in need for need in missing_inputs(config))
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "gcsfs", None)
        with pytest.raises(UserError, match="gs:// needs gcsfs, found none; install it with `pip install gcsfs`"):
            locate(f"{bucket}/run")
    assert make_writable(tmp_path / "new" / "run").is_dir() and not any((tmp_path / "new" / "run").iterdir())
