"""The server as a program: its flags, how it stops, and clients of one that was killed."""

from __future__ import annotations

import hashlib
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from helpers import people
from programs import ROOT, Program, completed
from serving import Running

from retrieval.corpus import MemoryMappedCorpus, write_corpus
from retrieval.encoders.hashing import HashingEncoder
from retrieval.indexing.directory import build_index
from retrieval.protocol import RetrievalError
from retrieval.remote.client import HttpRetriever
from retrieval.remote.server import make_app
from retrieval.service import RetrievalService

PROGRAM = ROOT / "launch" / "serve_retriever.py"


STUCK = """
import os, time
from retrieval.remote import http
from retrieval.remote.server import make_app, serve

class Stuck:
    def search(self, queries, k):
        time.sleep(60)

    def describe(self):
        return {"corpus": None, "corpus_sha256": None, "rows": 1}

with http.listen("0.0.0.0", 0) as listener:
    print("finished:", serve(listener, make_app(Stuck()), "0.0.0.0", "{url}", stop_s=1), flush=True)
os._exit(0)
"""


def test_a_stop_has_an_end():
    """Neither an endless body nor a long search delays a stop beyond its limit; their clients get a 503."""
    command, pipe = [sys.executable, "-c", STUCK], subprocess.PIPE
    process = subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=pipe, text=True)
    port = urlsplit(process.stdout.readline()).port
    ask = "POST /retrieve HTTP/1.1\r\nHost: localhost\r\nContent-Length: {}\r\n\r\n"
    connections = [socket.create_connection(("127.0.0.1", port), timeout=20) for _ in range(2)]
    body = '{"queries": ["a"]}'
    connections[0].sendall((ask.format(len(body)) + body).encode())
    connections[1].sendall((ask.format(1000) + body).encode())
    time.sleep(0.3)
    process.send_signal(signal.SIGTERM)
    started = time.monotonic()
    replies = [connection.makefile("rb").read().decode() for connection in connections]
    output, errors = process.communicate(timeout=30)
    assert time.monotonic() - started < 10 and process.returncode == 0 and output == "finished: False\n"
    assert all("503" in text.split("\r\n")[0] and "stopping" in text for text in replies), replies
    assert "--host=0.0.0.0 without --token_file" in errors and "Traceback" not in errors
    for connection in connections:
        connection.close()


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("served")
    write_corpus(root / "people.jsonl", people())
    corpus = MemoryMappedCorpus(root / "people.jsonl")
    build_index(root / "index", corpus, HashingEncoder(256).fit(corpus))
    return root / "index"


def start(directory: Path, *flags: str) -> tuple[Program, str]:
    """A server process and its address."""
    process = Program([PROGRAM, f"--index={directory}", *flags])
    line = process.stdout.readline()
    assert line.startswith("serving 320 passages on http://127.0.0.1:"), line + process.stderr.read()
    return process, line.split()[-1]


def test_the_program_serves_and_stops(directory, tmp_path):
    """SIGTERM finishes the request in progress and ends with code 0."""
    (tmp_path / "token").write_text("s3cret\n")
    process, url = start(directory, "--port=0", f"--token_file={tmp_path / 'token'}")
    retriever = HttpRetriever(url, token="s3cret")
    expected = RetrievalService.open(directory).search(["Baro Quill born"], 2)
    assert retriever.search(["Baro Quill born"], 2) == expected
    with pytest.raises(RetrievalError, match="401"):
        HttpRetriever(url).search(["a"], 1)
    with ThreadPoolExecutor() as pool:
        large = pool.submit(retriever.search, [p.title for p in people()], 50)
        time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert len(large.result()) == 320
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 0 and errors == ""


def test_a_server_describes_its_corpus_and_replicas_must_agree(directory):
    """An evaluation can name the corpus of a server, and replicas that rank or contain other passages are refused."""
    service = RetrievalService.open(directory)
    digest = hashlib.sha256((directory / "corpus.jsonl").read_bytes()).hexdigest()
    ranking = service.describe()["ranking_sha256"]
    described = {"corpus": "index", "corpus_sha256": digest, "ranking_sha256": ranking, "rows": 320}
    other = RetrievalService.from_corpus(people())  # vectors of another width
    assert service.describe() == described
    assert other.describe() == {**described, "corpus": None, "ranking_sha256": other.describe()["ranking_sha256"]}
    with Running(make_app(service)) as first, Running(make_app(service)) as second, Running(make_app(other)) as third:
        urls = [f"{running.url}/retrieve" for running in (first, second, third)]
        assert HttpRetriever(",".join(urls[:2])).describe() == described
        with pytest.raises(RetrievalError, match="replicas of one index.*ranking_sha256"):
            HttpRetriever(",".join(urls[1:])).describe()
    with pytest.raises(RetrievalError, match="no answer in 0 s"):
        HttpRetriever(urls[0], retry_deadline_s=0).describe()


def test_a_killed_server_is_waited_for(directory):
    """A client waits for a killed server to be restarted, and then gets its own answers."""
    process, url = start(directory, "--port=0")
    retriever = HttpRetriever(url, retry_deadline_s=60)
    direct = RetrievalService.open(directory)
    queries = [f"{p.title} born" for p in people()]
    assert retriever.search(queries[:5], 2) == direct.search(queries[:5], 2)
    process.kill()
    process.communicate()
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(retriever.search, queries, 2)
        time.sleep(0.5)
        assert not waiting.done()
        restarted, _ = start(directory, f"--port={urlsplit(url).port}")
        assert waiting.result(timeout=60) == direct.search(queries, 2)
    restarted.terminate()
    restarted.communicate()


def test_bad_flags_are_one_line(directory, tmp_path):
    """A wrong flag ends with code 2 and one line that names it."""
    (tmp_path / "empty").write_text("\n")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for flags, words in (
            ([f"--index={tmp_path / 'absent'}"], "manifest.json"),
            ([f"--index={directory}", f"--port={port}"], f"--port={port}: cannot be bound"),
            ([f"--index={directory}", f"--token_file={tmp_path / 'empty'}"], "found 0 words"),
            ([f"--index={directory}", f"--token_file={tmp_path / 'absent'}"], "cannot be read"),
        ):
            done = completed([PROGRAM, *flags], timeout=120)
            (line,) = done.stderr.splitlines()
            assert done.returncode == 2 and done.stdout == "" and words in line
