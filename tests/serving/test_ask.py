"""launch/ask.py as a user runs it: real processes, the shipped policy, its own world or a user's corpus."""

import json
import re
import shlex
import signal
import subprocess
import sys
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from absl import flags
from absl.testing import flagsaver
from programs import ROOT, completed

from configs import smoke
from psearch_jax.assembly import build, policy_flags
from psearch_jax.closed_world.encyclopedia import ClosedWorld
from psearch_jax.closed_world.question_forms import questions
from psearch_jax.config import Config, RetrievalSection, from_mapping
from psearch_jax.limits import validate
from psearch_jax.runtime import cli
from psearch_jax.runtime.paths import TOYS
from psearch_jax.types import UserError

SEARCHED = "Are the setting of Gamudol and the rival of Pujazas the same?"
ASK = [sys.executable, "launch/ask.py"]


def test_questions_are_answered_by_two_methods_beside_each_other():
    """Both methods answer each question, and the sequential one runs one query per search."""
    asked = questions(ClosedWorld.make(0), "eval", "parallel", 2, 0)
    done = completed([*ASK, "--json", "--compare=search_r1", *(q.text for q in asked)])
    assert done.returncode == 0, done.stderr[-2000:]
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert [f["question"] for f in answers] == [q.text for q in asked for _ in range(2)]
    assert [f["method"] for f in answers] == ["parallelsearch", "search_r1"] * 2
    assert all(f["status"] == "answered" and f["seconds"] > 0 for f in answers)
    searches = [turn["queries"] for f in answers[1::2] for turn in f["turns"] if turn["queries"]]
    assert len(searches) > 3 and all(len(queries) == 1 for queries in searches)
    assert all(len(turn["passages"]) == len(turn["queries"]) for f in answers for turn in f["turns"])


def test_without_arguments_an_example_is_asked_and_drawn(tmp_path):
    """Without a question an example is answered; --svg draws all the output, and the picture loads nothing."""
    picture = tmp_path / "new" / "ask.svg"
    done = completed([*ASK, f"--svg={picture}"])
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    assert lines[0].startswith("> ") and any(line.startswith("answer: ") for line in lines)
    svg = ElementTree.parse(picture).getroot()
    texts = [element for element in svg.iter("{http://www.w3.org/2000/svg}text") if element.get("clip-path")]
    wrapped = "".join("".join(text.text for text in texts).split())
    assert all("".join(line.split()) in wrapped for line in lines)
    assert not re.search(r"""url\(["']?http|src:""", picture.read_text())


def test_a_users_own_passages_are_searched_and_lines_of_standard_input_asked(tmp_path):
    """A corpus that the user names replaces the toy world, and every input line is a question."""
    row = {"id": "mine", "title": "", "text": "The hometown of Zzyzx is Quibber."}
    (tmp_path / "corpus.jsonl").write_text(json.dumps(row) + "\n")
    command = [*ASK, "--json", f"--corpus={tmp_path / 'corpus.jsonl'}"]
    asked = "What is the hometown of Bala?\n\nWhat is the hometown of Tora?\n"
    done = subprocess.run(command, cwd=ROOT, input=asked, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert [f["question"] for f in answers] == [line for line in asked.splitlines() if line]
    passages = {p["id"] for f in answers for t in f["turns"] for ranking in t["passages"] for p in ranking}
    assert passages == {"mine"}


def test_a_stopped_list_of_questions_is_not_taken_for_a_complete_one():
    """Ctrl-C ends with its own exit code, and writes nothing but JSON to standard output."""
    asking = subprocess.Popen(
        [*ASK, "--json"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
    asking.stdin.write(f"{SEARCHED}\n")
    asking.stdin.flush()
    first = asking.stdout.readline()
    asking.send_signal(signal.SIGINT)  # while it waits for the next line
    rest, errors = asking.communicate(timeout=120)
    assert asking.returncode == cli.INTERRUPTED and json.loads(first)["question"] == SEARCHED and rest == "", errors
    assert errors.strip().splitlines()[-1] == "ask: interrupted by Ctrl-C"


def test_a_reader_that_has_enough_is_no_error():
    """`| head -1` ends without a traceback."""
    command = f"{sys.executable} launch/ask.py --json {shlex.quote(SEARCHED)} {shlex.quote(SEARCHED)} | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert json.loads(done.stdout)["question"] == SEARCHED and "Traceback" not in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--svg=a.svg", "--json", "Who?"], "--svg"),
        (["--model=nowhere", "Who?"], "--model=nowhere: there is no such directory"),
        (["--model=psearch_jax/assets/toy_policy", "Who?"], "--index"),
        (["--config.rollout.slots=9", "--config=configs/smoke.py", "Who?"], "--config.rollout.slots"),
        (["--index=a", "--corpus=b", "Who?"], "--index, --corpus: found several"),
        (["--retriever_url=http://127.0.0.1:9/retrieve", SEARCHED], "1 of 1 questions"),
        (["--compare=parallelsearch", "Who?"], "--compare=parallelsearch: the policy's own method"),
    ],
)
def test_what_cannot_be_asked_is_one_line(arguments, named):
    """Bad input ends with code 2 and an error that names it."""
    done = completed([*ASK, *arguments])
    assert done.returncode == 2 and named in done.stderr and "Traceback" not in done.stderr, done.stderr


def test_the_token_of_a_runs_server_goes_to_no_other(monkeypatch):
    """The token of the run's own server is not sent to the server of --retriever_url."""
    with flagsaver.flagsaver(model="toy", retriever_url="http://127.0.0.1:9/retrieve"):
        own = Config(retrieval=RetrievalSection(url="http://own:1/retrieve", token_file="/run/secrets/own"))
        assert policy_flags.config("toy", own).retrieval == RetrievalSection(url="http://127.0.0.1:9/retrieve")
        monkeypatch.setattr(sys, "argv", ["ask", "--config.retrieval.token_file=mine", "--config.rollout.slots=3"])
        with flagsaver.flagsaver():
            flags.FLAGS.set_default("config", policy_flags.DEFAULTS)
            flags.FLAGS(sys.argv)
            changed = replace(own, rollout=replace(own.rollout, turn_tokens=77))
            named = policy_flags.config("toy", changed)
        assert named.retrieval == RetrievalSection(url="http://127.0.0.1:9/retrieve", token_file="mine")
        assert named.rollout == replace(changed.rollout, slots=3), "a field that no flag names keeps the run's value"
    with flagsaver.flagsaver(model="toy"):
        assert policy_flags.config("toy", own).retrieval.token_file == "/run/secrets/own"


def test_named_passages_replace_those_of_the_run(given):
    """A corpus that the user names replaces the run's own index or retriever, which may use it if it is named, too."""
    own = Config(retrieval=RetrievalSection(service="own.py:Titles", topk=5))
    with flagsaver.flagsaver(model="toy"):
        assert policy_flags.config("toy", own).retrieval == own.retrieval
        given({"retrieval.corpus": "new.jsonl"})
        assert policy_flags.config("toy", own).retrieval == RetrievalSection(corpus="new.jsonl", topk=5)
        assert policy_flags.passages()["service"] == ""
        given({"retrieval.corpus": "new.jsonl", "retrieval.service": "own.py:Dates"})
        named = RetrievalSection(corpus="new.jsonl", service="own.py:Dates", topk=5)
        assert policy_flags.config("toy", own).retrieval == named
    own = Config(retrieval=RetrievalSection(index="old", token_file="secret", topk=5))
    with flagsaver.flagsaver(model="toy"):
        given({"retrieval.corpus": "new.jsonl"})
        assert policy_flags.config("toy", own).retrieval == RetrievalSection(corpus="new.jsonl", topk=5)
        assert policy_flags.to_serve(ROOT, 4).data.source == "", "not the closed world either"
    both = replace(own, retrieval=replace(own.retrieval, corpus="new.jsonl"))
    with pytest.raises(UserError, match="config.retrieval: found index and corpus, accepted: one of"):
        validate(both, training=False)


@pytest.fixture
def given(monkeypatch):
    """Sets what --config.SECTION.FIELD would; a process can parse such flags only once."""
    return lambda fields: monkeypatch.setattr(policy_flags, "_overrides", lambda: fields)


def test_the_compared_method_is_complete():
    """The second method has its own prompt and settings, not those of the first."""
    toy = from_mapping(smoke.get_config().to_dict())
    toy = replace(toy, model=replace(toy.model, path=""), data=replace(toy.data, template="parallel"))
    toy = replace(toy, rollout=replace(toy.rollout, context_tokens=2048, prompt_tokens=1024))
    parts = build.from_path(replace(toy, method="search_r1"), "toy")
    second = build.by_method(parts, replace(toy, method="search_r1"), "parallelsearch")
    expected = build.from_path(replace(toy, method="parallelsearch"), "toy").collector
    assert second.rollout == expected.rollout and second.retrieval == expected.retrieval
    (asked,) = questions(parts.world, "eval", "parallel", 1, 0)
    assert second.render(asked) == expected.render(asked) != parts.collector.render(asked)


def test_a_tokenizer_that_lies_elsewhere_now(tmp_path):
    """A tokenizer path of another machine gives way to the model's own, unless the user named it."""
    there, gone = str(TOYS["toy"]), str(tmp_path / "cache" / "snapshots" / "1")
    for first, recorded, expected in [
        ("toy", gone, there),
        (there, str(tmp_path), str(tmp_path)),
        (str(tmp_path / "none"), gone, gone),
        ("toy", "some/hub-id", "some/hub-id"),
    ]:
        config = Config(model=replace(Config().model, path=first))
        assert build.locate_tokenizer(config, recorded) == expected
    named = Config(model=replace(Config().model, path="toy", tokenizer="mine"))
    assert build.locate_tokenizer(named, gone) == "mine"


@pytest.fixture(scope="module", autouse=True)
def defined():
    """The program's flags, parsed from an empty command line."""
    if "retriever_url" not in flags.FLAGS:
        policy_flags.define_flags("toy")
    flags.FLAGS([""])


@pytest.mark.parametrize("program", ["ask", "eval", "sample", "serve_agent"])
def test_the_help_lists_the_flags_that_several_programs_share(program):
    """--help shows how to name the policy and the passages."""
    shown = completed([sys.executable, f"launch/{program}.py", "--help"]).stdout
    assert all(f"--{name}:" in shown or f"--[no]{name}:" in shown for name in ("model", "index", "corpus", "best"))
