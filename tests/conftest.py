"""Fixtures shared by all tests."""

import os
import shutil
import signal
from collections import Counter
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # if libtpu is installed, jax would look for a TPU and log much

import pytest
import tokenizers
from helpers import PASSAGES
from transformers import PreTrainedTokenizerFast

from experiments.toy.tokenizer import write_tokenizer
from psearch_jax.config import PRESETS
from psearch_jax.models import decoder, hf
from psearch_jax.runtime import cli
from psearch_jax.text.tokenizer import Tokenizer
from retrieval.corpus import MemoryMappedCorpus, write_corpus
from retrieval.encoders.hashing import HashingEncoder
from retrieval.indexing.directory import build_index

cli.configure_jax()  # tests and the programs they start share one compilation cache
# If a shell runs the tests in the background, they ignore SIGINT, and the programs that they start would, too.
signal.signal(signal.SIGINT, signal.default_int_handler)

SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Runs files with the most slow tests first: a slow file started last would leave all but one process idle."""
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: -slow[item.path])  # stable: the tests of a file stay together and in order


def pytest_terminal_summary(terminalreporter) -> None:
    """Prints the figures that tests recorded (tests/test_real.py) as one table."""
    reports = [r for outcome in ("passed", "failed") for r in terminalreporter.getreports(outcome)]
    rows = [value for r in reports if r.when == "call" for name, value in r.user_properties if name == "figure"]
    if rows:
        terminalreporter.section("figures")
        width = max(len(what) for what, _ in rows)
        for what, value in rows:
            terminalreporter.write_line(f"| {what:{width}} | {value} |")


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The optional folder, next to the repository, with the real vocabulary, questions and reward vectors."""
    if not SHARED_DATA.is_dir():
        pytest.skip("the optional data folder ../shared/data is absent")
    return SHARED_DATA


CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def tiny_tokenizer(tmp_path_factory) -> Tokenizer:
    """A byte-level BPE of about 400 tokens trained on a few tagged lines, loaded from its tokenizer.json."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        show_progress=False,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    lines = [
        "<think> who is older </think>\n<search> Ada Lovelace born ## Alan Turing born </search>\n\n",
        "\n<information>\nAda Lovelace was born in 1815.\n</information>\n<answer> Ada Lovelace </answer>.",
        "<search>a</search><think></think></search></answer>\n</answer></think>",
    ]
    backend.train_from_iterator(lines * 20, trainer)
    hf = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHAT_TEMPLATE,
    )
    directory = tmp_path_factory.mktemp("tiny_tokenizer")
    hf.save_pretrained(directory)
    return Tokenizer.load(directory)


@pytest.fixture(scope="session")
def real_tokenizer(shared_data) -> Tokenizer:
    """The tokenizer of Qwen2 and Qwen2.5, from vocab.json and merges.txt."""
    return Tokenizer.load(shared_data / "qwen2_tokenizer")


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory) -> Tokenizer:
    """The toy policy's tokenizer, newly written."""
    directory = tmp_path_factory.mktemp("toy_tokenizer")
    write_tokenizer(directory)
    return Tokenizer.load(directory)


def random_policy(folder: Path, tokenizer: Tokenizer) -> Path:
    """A policy of two narrow layers with random weights, as a Hugging Face directory."""
    shape = replace(
        PRESETS["toy"],
        vocab_rows=tokenizer.size + 10,
        width=32,
        layers=2,
        head_dim=8,
        mlp=64,
        eos_ids=tuple(sorted(tokenizer.stop_ids)),
    )
    hf.save_hf(decoder.init_params(shape, 0), shape, tokenizer.name, folder / "hf")
    return folder / "hf"


@pytest.fixture(scope="session")
def tiny_policy(tmp_path_factory, tokenizer) -> Path:
    """A random policy with the closed world's tokenizer."""
    return random_policy(tmp_path_factory.mktemp("policy"), tokenizer)


@pytest.fixture(scope="session")
def wordy_policy(tmp_path_factory, tiny_tokenizer) -> Path:
    """A random policy whose tokenizer can produce any text."""
    return random_policy(tmp_path_factory.mktemp("wordy"), tiny_tokenizer)


@pytest.fixture(scope="module")
def index(tmp_path_factory) -> Path:
    """The directory of an index of a few passages with hashed vectors."""
    folder = tmp_path_factory.mktemp("index")
    write_corpus(folder / "corpus.jsonl", PASSAGES)
    corpus = MemoryMappedCorpus(folder / "corpus.jsonl")
    build_index(folder / "index", corpus, HashingEncoder().fit(corpus))
    return folder / "index"


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    """A headless Chromium with an empty profile (tests/support/browsing.py)."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    driver = shutil.which("chromedriver")
    if not chromium or not driver:
        pytest.skip("no chromium and chromedriver on this machine")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    names = "headless=new no-sandbox disable-gpu disable-quic no-first-run disable-background-networking disable-sync"
    profile = f"user-data-dir={tmp_path_factory.mktemp('profile')}"
    for name in (*names.split(), "disable-component-update", profile):
        options.add_argument(f"--{name}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    started = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield started
    started.quit()
