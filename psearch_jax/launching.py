"""What the programs in launch/ share: how they start, and how they report bad input."""

from __future__ import annotations

import ast
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
from absl import app, flags

from psearch_jax import platforms, processes, progress
from psearch_jax.paths import STORE, of_store
from psearch_jax.types import ITEM, UserError, first_line
from retrieval.protocol import CorpusError, RetrievalError

BAD_INPUT = 2  # exit code
LOST = 3  # exit code of a process whose run has lost another
# Without PyTorch, which nothing here needs, transformers says so on stderr at every start.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
CACHE_VARIABLE = "JAX_COMPILATION_CACHE_DIR"
CACHE_HOME = Path.home() / ".cache" / "psearch_jax"
DEFAULT_CACHE = CACHE_HOME / "xla"


def run(main: Callable[[list[str]], None], positional: bool = False) -> None:
    """Parses the flags, calls `main(argv)` and exits: bad input is one line on stderr and exit code 2.

    Args:
      main: gets the program's name and what is left of the command line.
      positional: whether arguments that belong to no flag are accepted.
    """
    platforms.skip_absent_tpu()
    progress.show()

    def guarded(argv: list[str]) -> int:
        try:
            main(argv)
        except (UserError, CorpusError, RetrievalError) as error:
            return _refuse(str(error))
        except (FileExistsError, NotADirectoryError, PermissionError) as error:  # of a directory the user named
            return _refuse(str(error))
        except Exception as error:
            if not of_store(error):
                raise
            return _refuse(f"{STORE}: cannot be reached, read or written ({' '.join(str(error).split())[:300]})")
        return 0

    def ended(argv: list[str]) -> int:
        try:
            code = guarded(argv)
        except Exception as error:
            if not jax.distributed.is_initialized():
                raise
            if processes.lost(error):
                reason = first_line(error)[:200]
                code = _refuse(f"the processes of this run lost each other ({reason}); the same commands resume", LOST)
            else:
                traceback.print_exc()
                code = 1
        if code and jax.distributed.is_initialized():
            sys.stdout.flush()
            sys.stderr.flush()
            if processes.first():  # the others are aborted when it is gone: they get to say their own line
                time.sleep(2)
            os._exit(code)  # an orderly exit waits for the other processes, which wait for this one
        return code

    app.run(ended, flags_parser=lambda argv: _parse(argv, positional))


def process_flags() -> None:
    """Defines the flags of a program that can run in several processes; `configure_jax` joins those that they name."""
    flags.DEFINE_string("coordinator", "", "Of several processes: HOST:PORT of the first.")
    flags.DEFINE_integer("processes", 0, "Of several processes: how many there are.")
    flags.DEFINE_integer("process", -1, "Of several processes: which one this is, from 0.")
    flags.DEFINE_bool("distributed", False, "Several processes, as a TPU pod, Slurm or Kubernetes names them.")


def server_flags(port: int) -> None:
    """Defines the flags of a program that serves over HTTP, by default at `port`; `server_token` reads one of them."""
    flags.DEFINE_string("host", "127.0.0.1", "Address to listen on; 0.0.0.0 is every network this machine is in.")
    flags.DEFINE_integer("port", port, "Port; 0 takes a free one.", 0, 65535)
    flags.DEFINE_string("token_file", None, "File with the bearer token that clients have to send.")
    flags.DEFINE_integer("stop_seconds", 20, "How long a stop waits for what is in flight.", 0)


def server_token() -> str | None:
    """The token that --token_file holds; None: clients are asked for none. Raises as `read_token` does."""
    file = flags.FLAGS.token_file
    return read_token(file, "--token_file") if file else None


def configure_jax() -> None:
    """Turns the persistent compilation cache on, for every program however small; our log lines go to stderr, plain.
    Joins the other processes, where `process_flags` names any.

    The cache is in $JAX_COMPILATION_CACHE_DIR, by default in ~/.cache/psearch_jax/xla.
    """
    platforms.skip_absent_tpu()
    jax.config.update("jax_compilation_cache_dir", os.environ.get(CACHE_VARIABLE) or str(DEFAULT_CACHE))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    for name in ("jax", "transformers", "httpx", "httpx2"):  # the last two: each request of the hub's client
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("huggingface_hub").propagate = False  # it has a handler of its own: absl's would say all twice
    logging.getLogger("absl").setLevel(logging.CRITICAL)  # Orbax's: it logs every error that it also raises
    if "coordinator" in flags.FLAGS and flags.FLAGS.is_parsed():
        values = flags.FLAGS
        processes.start(values.coordinator, values.processes, values.process, values.distributed)
    own = logging.getLogger("psearch_jax")
    if not own.handlers:
        handler = logging.StreamHandler(sys.stderr)
        several = jax.distributed.is_initialized()
        handler.setFormatter(
            logging.Formatter(f"process {jax.process_index()}: %(message)s" if several else "%(message)s")
        )
        own.addHandler(handler)
        own.setLevel(logging.WARNING if several and not processes.first() else logging.INFO)
        own.propagate = False


def read_token(path: str, name: str) -> str:
    """The word in a file. Raises `UserError` naming the flag or field `name` when there is none."""
    try:
        words = Path(path).read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{name}={path}: cannot be read ({error})") from None
    if len(words) != 1:
        raise UserError(f"{name}={path}: found {len(words)} words, accepted: one, the token")
    return words[0]


def _parse(argv: Sequence[str], positional: bool) -> list[str]:
    """The arguments left by the flags; flags that cannot be read end the program with exit code 2."""
    try:
        rest = flags.FLAGS(argv)
        if "config" in flags.FLAGS:
            getattr(
                flags.FLAGS.config, "to_dict", None
            )  # a file that could not be opened says so only when it is used
    except (flags.Error, UserError) as error:
        sys.exit(_refuse(str(error)))
    except OSError as error:
        sys.exit(_refuse(f"--config: {str(error).strip().splitlines()[-1].strip()}"))
    except (AttributeError, KeyError) as error:  # what ml_collections raises for an unknown field or section
        if not any(argument.startswith(("--config.", "-config.")) for argument in argv):
            raise
        sys.exit(_refuse(f"--config: unknown field {_unquoted(str(error))}"))
    if len(rest) > 1 and not positional:
        sys.exit(_refuse(f"{rest[1]!r} found, accepted: flags only (--help lists them)"))
    return rest


def _unquoted(text: str) -> str:
    """What a string literal stands for; any other text as it is."""
    try:
        return str(ast.literal_eval(text))
    except (ValueError, SyntaxError):
        return text


def _refuse(message: str, code: int = BAD_INPUT) -> int:
    """Prints a message in one line, and what it lists in one line each."""
    lines = (" ".join(line.split()) for line in message.split(ITEM))
    print(f"{Path(sys.argv[0]).stem}: {ITEM.join(lines)}", file=sys.stderr)
    return code
