"""docs/own.md: the examples for a user's own data, prompt, reward or retriever work as described."""

import json
import re
import runpy
import shlex
import sys

import pytest
from programs import ROOT, completed
from runs import command, run

from psearch_jax.config import from_mapping
from psearch_jax.limits import validate

PAGE = (ROOT / "docs" / "own.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^python (.*(?:\\\n.*)*)", PAGE, re.MULTILINE)


def words_of(program: str) -> list[str]:
    """The first command of the page that runs `program`, as words."""
    first = next(line for line in COMMANDS if line.startswith(program))
    return shlex.split(first.replace("\\\n", " "))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """The directory that examples/custom_questions.py writes from twenty text files."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "texts").mkdir()
    for i in range(20):
        (folder / "texts" / f"note_{i}.txt").write_text(f"The note {i} was written by Ada.")
    given = {"--texts=texts": f"--texts={folder}/texts", "--out=data": f"--out={folder}/data"}
    run([sys.executable, *(given.get(word, word) for word in words_of("examples/custom_questions.py"))])
    return folder / "data"


def example(name: str, workdir, policy, data, *flags: str, **fields) -> list[str]:
    """The command of an example that trains for a step on the data, with a tiny model."""
    _, _, *small = command(
        workdir,
        policy,
        1,
        **{
            "data.source": data / "questions.jsonl",
            "data.template": data / "prompt.txt",
            "rollout.context_tokens": 1024,
            "rollout.prompt_tokens": 640,
            "learning.mini_batch_rollouts": 8,
            "eval.questions_per_kind": 0,
            **fields,
        },
    )
    return [sys.executable, name, *small, *flags]


def trajectories(workdir) -> list[dict]:
    return [json.loads(line) for line in open(workdir / "trajectories" / "000000.jsonl")]


def test_the_data_files_are_complete(data):
    """A text is not in the corpus, or a question lacks the type that decides its reward."""
    corpus, questions = (
        [json.loads(line) for line in open(data / name)] for name in ("corpus.jsonl", "questions.jsonl")
    )
    assert len(corpus) == 20 and corpus[3]["text"].startswith("The note") and corpus[3]["title"].startswith("note ")
    assert {question["metadata"]["type"] for question in questions} == {"single", "parallel", "sequential"}
    assert "{question}" in (data / "prompt.txt").read_text()


def test_a_directory_without_texts_is_refused(tmp_path):
    """A mistyped directory would give an empty corpus."""
    command = [sys.executable, "examples/custom_questions.py", f"--texts={tmp_path}", f"--out={tmp_path / 'out'}"]
    done = completed(command)
    assert done.returncode == 2 and f"--texts={tmp_path}: no .txt files found" in done.stderr
    assert not (tmp_path / "out").exists()


def test_long_texts_become_several_passages(tmp_path):
    """A text of any length would be one passage, of which an observation shows only the beginning."""
    (tmp_path / "long_story.txt").write_text(" ".join(f"w{i}" for i in range(250)))
    run([sys.executable, "examples/custom_questions.py", f"--texts={tmp_path}", f"--out={tmp_path / 'out'}"])
    rows = [json.loads(line) for line in (tmp_path / "out" / "corpus.jsonl").read_text().splitlines()]
    assert [(row["id"], row["title"]) for row in rows] == [(f"long_story-{i}", "long story") for i in range(3)]
    assert " ".join(row["text"] for row in rows).split() == [f"w{i}" for i in range(250)]


def test_the_config_file_of_the_page(tmp_path):
    """The example of a config file names a field that does not exist, or is refused."""
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "get_config" in block)
    (tmp_path / "mine.py").write_text(code)
    given = runpy.run_path(str(tmp_path / "mine.py"))["get_config"]()
    validate(from_mapping(given.to_dict()))


def test_the_index_is_built_as_the_page_says(tmp_path, data):
    """The first command that users run on their own corpus fails."""
    given = {"--corpus=data/corpus.jsonl": f"--corpus={data}/corpus.jsonl", "--out=index": f"--out={tmp_path}/index"}
    run([sys.executable, *(given.get(word, word) for word in words_of("launch/build_index.py"))])
    assert (tmp_path / "index" / "manifest.json").is_file()


@pytest.mark.slow
def test_the_reward_and_the_prompt_are_used(tmp_path, data, wordy_policy, tiny_tokenizer):
    """An own reward or prompt is ignored, or a resume continues with another reward without a word."""
    text = (ROOT / "examples" / "custom_reward.py").read_text(encoding="utf-8")
    for name, values in {"first.py": "7.0, -1", "second.py": "0.5, 3"}.items():
        changed = text.replace("PENALTY_PER_WORD, FREE_WORDS = 0.01, 5", f"PENALTY_PER_WORD, FREE_WORDS = {values}")
        assert changed != text
        (tmp_path / name).write_text(changed)
    workdir, fields = tmp_path / "run", {"retrieval.corpus": data / "corpus.jsonl"}
    run(example(tmp_path / "first.py", workdir, wordy_policy, data, **fields))
    rows = trajectories(workdir)
    assert len(rows) == 8 and all("librarian" in tiny_tokenizer.hf.decode(row["ids"]) for row in rows)
    assert all(
        row["reward"]["format"] <= -6.9 for row in rows
    )  # at least 7 for any answer or none, as FREE_WORDS is -1
    refused = completed(example(tmp_path / "second.py", workdir, wordy_policy, data, **fields))
    assert refused.returncode == 2 and "reward.own" in refused.stderr, refused.stderr[-2000:]


@pytest.mark.slow
def test_the_retriever_is_used(tmp_path, data, wordy_policy):
    """An own retriever is refused, or accepted and not used."""
    flag, workdir = f"--corpus={data}/corpus.jsonl", tmp_path / "run"
    run(example("examples/custom_retriever.py", workdir, wordy_policy, data, flag, **{"rollout.initial_search": True}))
    passages = [
        p for row in trajectories(workdir) for turn in row["turns"] for block in turn["passages"] for p in block
    ]
    assert passages and all(passage["title"].startswith("note ") for passage in passages)
