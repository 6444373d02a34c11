"""The server as a program: its flags, how it stops, and clients of one that was killed."""

from __future__ import annotations

import hashlib
import random
import shutil
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
from serving import HTTP, Running

from retrieval.corpus import MemoryMappedCorpus, write_corpus
from retrieval.encoders.hashing import HashingEncoder
from retrieval.indexing.directory import build_index
from retrieval.protocol import RetrievalError
from retrieval.remote.client import HttpRetriever, connect
from retrieval.remote.server import make_app
from retrieval.service import RetrievalService

PROGRAM = ROOT / "launch" / "serve_retriever.py"


STUCK = """
import os, time
from retrieval.remote.server import Limits, make_app, serve

class Stuck:
    def search(self, queries, k):
        time.sleep(60)

    def describe(self):
        return {"corpus": None, "corpus_sha256": None, "rows": 1}

print("whole stop:", serve(make_app(Stuck()), "0.0.0.0", 0, "{url}", stop_s=1), flush=True)
os._exit(0)
"""


def test_a_stop_has_an_end():
    """One endless body, or one long search, that keeps the server from stopping until it is killed."""
    process = subprocess.Popen(
        [sys.executable, "-c", STUCK],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
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
    assert time.monotonic() - started < 10 and process.returncode == 0 and output == "whole stop: False\n"
    assert all("503" in text.split("\r\n")[0] and "stopping" in text for text in replies), replies
    assert "--host=0.0.0.0 without --token_file" in errors and "Traceback" not in errors
    for connection in connections:
        connection.close()


EARLY = """
import os, signal, uvicorn
run = uvicorn.Server.run

def stopped(self, sockets):
    os.kill(os.getpid(), signal.SIGTERM)  # the address is printed, and uvicorn does not listen for signals yet
    run(self, sockets)

uvicorn.Server.run = stopped
"""


def test_a_stop_right_behind_the_start_is_heard():
    """A server that is stopped as it starts would run until it is killed."""
    script = EARLY + STUCK
    process = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert process.returncode == 0 and process.stdout.endswith("whole stop: True\n"), process.stderr[-2000:]


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
    """A SIGTERM that cuts off a request in progress, or exits with the code of a crash."""
    (tmp_path / "token").write_text("s3cret\n")
    process, url = start(directory, "--port=0", f"--token_file={tmp_path / 'token'}")
    retriever = HttpRetriever([url], token="s3cret")
    expected = RetrievalService.open(directory).search(["Baro Quill born"], 2)
    assert retriever.search(["Baro Quill born"], 2) == expected
    with pytest.raises(RetrievalError, match="401"):
        HttpRetriever([url]).search(["a"], 1)
    with ThreadPoolExecutor() as pool:
        large = pool.submit(retriever.search, [f"{p.title} {n}" for n in range(3) for p in people()], 50)
        time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert len(large.result()) == 960
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 0 and errors == ""


def test_the_corpus_behind_an_address_has_a_name(directory, tmp_path):
    """An evaluation that cannot name its corpus: results over a wrong one look like those over the right one."""
    service = RetrievalService.open(directory)
    digest = hashlib.sha256((directory / "corpus.jsonl").read_bytes()).hexdigest()
    ranking = service.describe()["ranking_sha256"]
    named = {"corpus": "index", "corpus_sha256": digest, "ranking_sha256": ranking, "rows": 320}
    in_memory = RetrievalService.from_corpus(people())
    from_file = RetrievalService.from_corpus(directory / "corpus.jsonl")
    other = in_memory.describe()["ranking_sha256"]  # vectors of another width
    assert service.describe() == named and other != ranking
    assert from_file.describe() == {**named, "corpus": "corpus.jsonl", "ranking_sha256": other}
    assert in_memory.describe() == {**named, "corpus": None, "ranking_sha256": other}
    part = RetrievalService.from_corpus(people()[:20])
    with Running(make_app(service, token="s3cret")) as one, Running(make_app(service)) as two:
        assert HTTP.request("GET", one.url + "/info").status == 401
        assert connect(one.url + "/retrieve", token="s3cret").describe() == named
        both = f"{one.url}/retrieve,{two.url}/retrieve"
        assert connect(both, token="s3cret").describe() == named
        with Running(make_app(part)) as three:
            parts = connect(f"{two.url}/retrieve|{three.url}/retrieve")
            joined = {name: f"{named[name]}|{part.describe()[name]}" for name in ("corpus_sha256", "ranking_sha256")}
            assert parts.describe() == {"corpus": None, **joined, "rows": 340}
            with pytest.raises(RetrievalError, match="not replicas of one index"):
                connect(f"{two.url}/retrieve,{three.url}/retrieve").describe()
        with Running(make_app(RetrievalService.open(shutil.copytree(directory, tmp_path / "copy")))) as four:
            assert connect(f"{two.url}/retrieve,{four.url}/retrieve").describe()["rows"] == 320
        with (
            Running(make_app(in_memory)) as five,
            pytest.raises(RetrievalError, match="replicas of one index.*ranking_sha256"),
        ):
            connect(f"{two.url}/retrieve,{five.url}/retrieve").describe()
    with pytest.raises(RetrievalError, match="no answer in 0 s"):
        connect(one.url + "/retrieve", retry_deadline_s=0).describe()


def test_a_killed_server_is_waited_for(directory):
    """kill -9 of the server that ends every client's run, or makes a client receive another one's reply afterwards."""
    process, url = start(directory, "--port=0")
    retriever = HttpRetriever([url], retry_deadline_s=60)
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
    """A wrong flag that ends in a traceback, or in a server that serves something else."""
    (tmp_path / "empty").write_text("\n")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for flags, words in (
            ([f"--index={tmp_path / 'absent'}"], "manifest.json"),
            ([f"--index={directory}", f"--port={port}"], f"--port={port}: cannot be bound"),
            ([f"--index={directory}", "--port=70000"], "--port"),
            ([f"--index={directory}", f"--token_file={tmp_path / 'empty'}"], "found 0 words"),
            ([f"--index={directory}", f"--token_file={tmp_path / 'absent'}"], "cannot be read"),
            ([], "--index"),
        ):
            done = completed([PROGRAM, *flags], timeout=120)
            (line,) = done.stderr.splitlines()
            assert done.returncode == 2 and done.stdout == "" and words in line


@pytest.mark.slow
def test_a_minute_of_sixty_four_clients(directory):
    """Under load, a reply to the wrong client, a reset connection, or a server that runs out of a resource."""
    process, url = start(directory, "--port=0", "--cache_queries=100")
    passages, direct = people(), RetrievalService.open(directory)
    until = time.monotonic() + 60

    def client(seed: int) -> int:
        rng, retriever, asked = random.Random(seed), HttpRetriever([url], retry_deadline_s=0), 0
        while time.monotonic() < until:
            queries = [f"{rng.choice(passages).title} born {rng.randrange(50)}" for _ in range(rng.randrange(1, 5))]
            k = rng.randrange(1, 4)
            assert retriever.search(queries, k) == direct.search(queries, k)
            asked += 1
        return asked

    with ThreadPoolExecutor(64) as pool:
        counts = list(pool.map(client, range(64)))
    process.terminate()
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 0 and errors == ""
    assert min(counts) > 20
