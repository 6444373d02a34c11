"""Both servers conform to their OpenAPI schemas, for requests within the bounds of the schemas and outside them.

About fifty random requests per operation, in addition to the edge cases of every field, the same in each run;
`HOSTILE=1000` draws that number, with new seeds.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import people
from serving import Running

from configs.smoke import get_config
from psearch_jax.assembly import build
from psearch_jax.config import from_mapping
from psearch_jax.serving import chat
from psearch_jax.serving.answerer import Answerer
from retrieval.remote import server
from retrieval.service import RetrievalService

COUNT = os.environ.get("HOSTILE", "50")
ALIKE = "--generation-database=none" if "HOSTILE" in os.environ else "--generation-deterministic"
TOKEN = "of-the-tests"
# A body beyond all bounds is refused before it is read.
SETTINGS = "[checks.negative_data_rejection]\nexpected-statuses = [401, 413, 422]\n"


def check(running: Running, directory: Path, without: str = "") -> None:
    """Runs every schemathesis check on every operation, and fails with its output."""
    (directory / "schemathesis.toml").write_text(SETTINGS)
    program = Path(sys.executable).with_name("schemathesis")
    options = ["--checks=all", f"--max-examples={COUNT}", ALIKE, "--continue-on-failure", "--no-color"]
    header = ["--header", f"Authorization: Bearer {TOKEN}", "--suppress-health-check=all", "--warnings=off"]
    options += [f"--exclude-checks={without}"] if without else []
    command = [program, "run", f"{running.url}/openapi.json", *options, *header]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=3000)
    shown = "\n".join(line[:300] for line in (done.stdout + done.stderr).splitlines())
    assert done.returncode == 0, shown
    assert "Tested: 4" in done.stdout, shown


def test_the_retrieval_server_is_what_it_says(tmp_path):
    """An unexpected request gets a 500, or a reply that clients generated from the schema cannot parse."""
    with Running(server.make_app(RetrievalService.from_corpus(people()), token=TOKEN)) as running:
        check(running, tmp_path)


@pytest.mark.slow
def test_chat_completions_are_what_they_say(tmp_path):
    """As above, for the chat server with the policy that is shipped."""
    config = from_mapping(get_config().to_dict())
    parts = build.from_path(replace(config, rollout=replace(config.rollout, slots=4, samples=2, num_buckets=1)), "toy")
    answerer = Answerer(parts.collector, parts.sampling_weights())
    try:
        with Running(chat.make_app(answerer, "toy", token=TOKEN)) as running:
            # Only the last message with role user is used, which no schema can express.
            check(running, tmp_path, without="negative_data_rejection,positive_data_acceptance")
    finally:
        answerer.close()
