"""Program start: invalid flags and errors of the user end in one line and exit code 2."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import errno

from absl import flags
from ml_collections import config_flags
from psearch_jax.runtime import cli
from psearch_jax.types import UserError, format_items

flags.DEFINE_integer("n", 1, "a number")
flags.DEFINE_string("name", None, "a name")
flags.DEFINE_float("share", 0.5, "a share", 0.0, 1.0)
config_flags.DEFINE_config_file("config", None, "a config")
cli.require("name")
cli.finite("share")

def main(argv):
    if flags.FLAGS.n == 2:
        raise UserError("questions.jsonl:3: bad row")
    if flags.FLAGS.n == 6:
        raise UserError(format_items("this run  needs:", ["a model\\n of some size", "a file"]))
    if flags.FLAGS.n == 5:
        raise ZeroDivisionError("a bug")
    if flags.FLAGS.n == 7:
        raise OSError(errno.ENOSPC, "No space left on device", "rows.jsonl")
    import jax
    cli.configure_jax()
    print(argv[1:], jax.config.jax_compilation_cache_dir, jax.config.jax_persistent_cache_min_entry_size_bytes)

cli.run(main, positional={positional})
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    directory = tmp_path_factory.mktemp("program")
    config = (
        "from ml_collections import ConfigDict\n\ndef get_config():\n    return ConfigDict({'size': {'rows': 3}})\n"
    )
    (directory / "config.py").write_text(config)
    (directory / "broken.py").write_text("def get_config():\n    raise ValueError(\"unknown key 'rolout'\")\n")
    (directory / "none.py").write_text("def get_config():\n    pass\n")
    (directory / "config.json").write_text('{"also_greedy": false}\n')
    for name, positional in (("flags_only", False), ("positional", True)):
        (directory / f"{name}.py").write_text(PROGRAM.replace("{positional}", str(positional)))

    def run(name, *arguments, **environment):
        command = [sys.executable, str(directory / f"{name}.py"), "--name=a", *arguments]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=120, cwd=directory, env=os.environ | environment
        )

    return run


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--n=2", "flags_only: questions.jsonl:3: bad row"),
        ("--n=7", "flags_only: [Errno 28] No space left on device: 'rows.jsonl'"),
        ("--n=6", "flags_only: this run needs:\n  - a model of some size\n  - a file\n"),
        ("--config=none.py", "flags_only: --config=none.py: get_config returns NoneType, accepted: an ml_collections"),
        ("--n=many", "flags_only: flag --n=many: invalid literal for int() with base 10: 'many'"),
        ("--m=2", "flags_only: Unknown command line flag 'm'"),
        ("file", "flags_only: 'file' found, accepted: flags only"),
        ("--config=nope.py", "flags_only: --config=nope.py: FileNotFoundError: [Errno 2] No such file or directory"),
        ("--config=broken.py", "flags_only: --config=broken.py: ValueError: unknown key 'rolout'"),
        ("--config=config.py --config.size.row=1", "unknown field 'row'; did you mean \"rows\""),
        (
            "--config=config.py --config.size.lr=1",
            "unknown field 'lr'; did you mean model.lora_rank or learn",
        ),
        ("--config=config.py --config.size.x=1", "unknown field 'x'; docs/configuration.md lists all fields"),
        ("--config=config.json", "flags_only: --config=config.json: no get_config found, accepted: a Python file"),
        ("--name=", "flags_only: flag --name=: found '', accepted: a value"),
        ("--share=nan", "flags_only: flag --share=nan: accepted: a finite number"),
        ("--config=config.py --config.size.rows=few", "flag --config.size.rows=few: invalid literal"),
    ],
)
def test_bad_input_is_one_line(program, argument, message):
    """A user's mistake ends in exit code 2 and one line, or in one line per item of a list."""
    done = program("flags_only", *argument.split())
    assert done.returncode == 2 and message in done.stderr, done.stderr
    assert len(done.stderr.strip().splitlines()) == (3 if argument == "--n=6" else 1) and done.stdout == ""


def test_arguments_compilation_cache_and_bugs(program, tmp_path):
    """Arguments and the cache's directory reach the program, and a bug keeps its traceback."""
    done = program("flags_only", "--n=5")
    assert done.returncode == 1 and "Traceback" in done.stderr and "ZeroDivisionError" in done.stderr
    done = program("positional", "a.jsonl", "b.jsonl", JAX_COMPILATION_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0 and done.stdout == f"['a.jsonl', 'b.jsonl'] {tmp_path} -1\n", done.stderr
    done = program("positional", JAX_COMPILATION_CACHE_DIR="", HOME=str(tmp_path))
    assert f"{tmp_path}/.cache/psearch_jax/xla" in done.stdout
