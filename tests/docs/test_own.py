"""docs/own.md: the examples for a user's own data, prompt, reward or retriever work as described."""

import json
import re
import runpy
import shlex
import shutil
import sys

import pytest
from calls import TEMPLATE
from programs import ROOT, completed
from runs import command, metrics_without_clocks, run

from psearch_jax.assembly.tools import make_dialect
from psearch_jax.config import from_mapping
from psearch_jax.limits import validate
from psearch_jax.rollout.calculator import CALCULATOR
from psearch_jax.text.tokenizer import Tokenizer
from psearch_jax.types import Call, UserError

PAGE = (ROOT / "docs" / "own.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^python (.*(?:\\\n.*)*)", PAGE, re.MULTILINE)


def run_from_page(program: str, **changes: str) -> None:
    """Runs the first command of the page with `program`, with other values of some flags."""
    words = shlex.split(next(line for line in COMMANDS if line.startswith(program)).replace("\\\n", " "))
    flags = {f"--{name}={value}" for name, value in changes.items()}
    changed = tuple(f"--{name}=" for name in changes)
    run([sys.executable, *(word for word in words if not word.startswith(changed)), *flags])


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """The directory that examples/custom_questions.py writes from text files, one of them longer than a passage."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "texts").mkdir()
    for i in range(20):
        (folder / "texts" / f"note_{i}.txt").write_text(f"The note {i} was written by Ada.")
    (folder / "texts" / "story.txt").write_text(" ".join(f"w{i}" for i in range(250)))
    run_from_page("examples/custom_questions.py", texts=f"{folder}/texts", out=f"{folder}/data")
    return folder / "data"


def example(name: str, workdir, policy, data, *flags: str, **fields) -> list[str]:
    """The command of an example that trains for a step on the data, with a tiny model."""
    small = {"rollout.context_tokens": 1024, "rollout.prompt_tokens": 640, "learning.mini_batch_rollouts": 8}
    files = {"data.source": data / "questions.jsonl", "data.template": data / "prompt.txt"}
    _, _, *words = command(workdir, policy, 1, **{**files, **small, "eval.questions_per_kind": 0, **fields})
    return [sys.executable, name, *words, *flags]


def trajectories(workdir) -> list[dict]:
    return [json.loads(line) for line in open(workdir / "trajectories" / "000000.jsonl")]


def test_the_data_files_are_complete_and_can_be_indexed(data, tmp_path):
    corpus, questions = (
        [json.loads(line) for line in open(data / name)] for name in ("corpus.jsonl", "questions.jsonl")
    )
    assert len(corpus) == 23 and sum(row["title"] == "story" for row in corpus) == 3
    assert {question["metadata"]["type"] for question in questions} == {"single", "parallel", "sequential"}
    assert "{question}" in (data / "prompt.txt").read_text()
    run_from_page("launch/build_index.py", corpus=f"{data}/corpus.jsonl", out=f"{tmp_path}/index")
    assert (tmp_path / "index" / "manifest.json").is_file()


def test_the_config_file_of_the_page_is_valid(tmp_path):
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "get_config" in block)
    (tmp_path / "mine.py").write_text(code)
    validate(from_mapping(runpy.run_path(str(tmp_path / "mine.py"))["get_config"]().to_dict()))


@pytest.mark.slow
def test_an_own_reward_and_prompt_are_used_and_recorded(tmp_path, data, wordy_policy, tiny_tokenizer):
    """The term is part of the reward that is learned from and logged, and a resume with an edited file is refused."""
    text = (ROOT / "examples" / "custom_reward.py").read_text(encoding="utf-8")
    (tmp_path / "mine.py").write_text(text.replace("FREE_WORDS = 5", "FREE_WORDS = -700"))  # at least 7 for any answer
    fields = {"retrieval.corpus": data / "corpus.jsonl"}
    fields["reward.terms"] = f"{tmp_path}/mine.py:short_answers=1.0,f1=0.5"
    train = example("launch/train.py", tmp_path / "run", wordy_policy, data, **fields)
    run(train)
    rows = trajectories(tmp_path / "run")
    assert len(rows) == 8 and all("librarian" in tiny_tokenizer.hf.decode(row["ids"]) for row in rows)
    assert all(row["reward"]["short_answers"] <= -7 and row["reward"]["total"] < -5 for row in rows)
    (metrics,) = metrics_without_clocks(tmp_path / "run")
    logged = [value for name, value in metrics.items() if name.endswith("/short_answers") and value is not None]
    assert logged and max(logged) <= -7 and metrics["reward"] < -5
    (tmp_path / "mine.py").write_text(text)
    refused = completed(train)
    assert refused.returncode == 2 and "reward.terms" in refused.stderr, refused.stderr[-2000:]
    assert "has other contents" in refused.stderr


@pytest.mark.slow
def test_an_own_tool_is_described_and_its_file_is_compared_on_resume(tmp_path, data, wordy_policy):
    """The prompts of the run have the tool and the search, and a resume with an edited file is refused."""
    shutil.copytree(wordy_policy, tmp_path / "policy")
    settings = json.loads((tmp_path / "policy" / "tokenizer_config.json").read_text())
    (tmp_path / "policy" / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": TEMPLATE}))
    (tmp_path / "policy" / "chat_template.jinja").write_text(TEMPLATE)
    shutil.copy(ROOT / "examples" / "custom_tool.py", tmp_path / "mine.py")
    fields = {"retrieval.corpus": data / "corpus.jsonl", "rollout.dialect": "tool_calls", "rollout.obs_tokens": 320}
    fields |= {"rollout.tools": f"{tmp_path}/mine.py:count_words,calculator"}
    fields |= {"rollout.prompt_tokens": 1600, "rollout.context_tokens": 2048, "data.template": "tool_calls"}
    train = example("launch/train.py", tmp_path / "run", tmp_path / "policy", data, **fields)
    run(train)
    tokenizer = Tokenizer.load(tmp_path / "policy")
    texts = [tokenizer.decode(row["ids"], control=True) for row in trajectories(tmp_path / "run")]
    assert all('"name": "search"' in text and '"name": "count_words"' in text for text in texts)
    (tmp_path / "mine.py").write_text((tmp_path / "mine.py").read_text() + "# edited\n")
    refused = completed(train)
    assert refused.returncode == 2 and "rollout.tools" in refused.stderr, refused.stderr[-2000:]


@pytest.mark.slow
def test_an_own_retriever_and_own_questions_are_used_and_recorded(tmp_path, data, wordy_policy):
    """Rollouts answer the questions of one file with the passages of the other; a resume after an edit is refused."""
    source = (ROOT / "examples" / "custom_source.py").read_text(encoding="utf-8")
    (tmp_path / "asked.py").write_text(source.replace("Who was born first", "Whose note was first"))
    shutil.copy(ROOT / "examples" / "custom_retriever.py", tmp_path / "titles.py")
    fields = {"retrieval.corpus": data / "corpus.jsonl", "retrieval.service": f"{tmp_path}/titles.py:TitleRetriever"}
    fields |= {"data.source": f"{tmp_path}/asked.py:questions", "rollout.initial_search": True}
    train = example("launch/train.py", tmp_path / "run", wordy_policy, data, **fields)
    run(train)
    rows = trajectories(tmp_path / "run")
    titles = [p["title"] for row in rows for t in row["turns"] for ps in t["passages"] for p in ps]
    assert titles and all(title.startswith("note ") for title in titles)
    assert {(row["source"], row["kind"]) for row in rows} == {("questions", "parallel")}
    for file, field in (("titles.py", "retrieval.service"), ("asked.py", "data.source")):
        before = (tmp_path / file).read_text()
        (tmp_path / file).write_text(before.replace("Ada Lovelace", "Ada King") + "# edited\n")
        refused = completed(train)
        assert refused.returncode == 2 and field in refused.stderr, refused.stderr[-2000:]
        (tmp_path / file).write_text(before)


def test_an_own_dialect_is_written_parsed_and_checked(tiny_tokenizer):
    """The class that a config names reads what it writes, and a file without it is refused."""
    path = ROOT / "examples" / "custom_dialect.py"

    def load(name):
        config = from_mapping({"rollout": {"dialect": f"{path}:{name}"}, "retrieval": {"max_sub_queries": 2}})
        validate(config)
        return make_dialect(config, tiny_tokenizer)

    calls = [Call("search", "a b"), Call("search", "c ## d")]
    text = f"<think>t</think>\n{load('Lines').write_calls(calls)}"
    assert load("Lines").parse(text).queries == ("a b", "c ## d") and load("Lines").parse(text).well_formed
    assert load("Lines").parse("<search>\na\nA\n a\n</search>").queries == ("a", "A")
    with pytest.raises(UserError, match="found with Lines, accepted: a dialect that calls tools"):
        make_dialect(from_mapping({"rollout": {"dialect": f"{path}:Lines"}}), tiny_tokenizer, [CALCULATOR])
    for name, problem in (("Call", "no Dialect found"), ("Nothing", "has no 'Nothing'")):
        with pytest.raises(UserError, match=problem):
            load(name)
