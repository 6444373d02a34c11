"""Start-up and error reporting of the programs in launch/."""

from __future__ import annotations

import errno
import logging
import math
import os
import runpy
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import jax
from absl import app, flags
from ml_collections import ConfigDict

from psearch_jax.config import Config
from psearch_jax.config.setting import settings_of
from psearch_jax.runtime import platforms, processes, progress
from psearch_jax.runtime.paths import STORE, is_store_error
from psearch_jax.types import ITEM, UserError, first_line
from retrieval.protocol import CorpusError, RetrievalError

BAD_INPUT = 2  # exit code
INTERRUPTED = 130  # as shells report a process that SIGINT ended
PIPE_CLOSED = 141  # and one that SIGPIPE ended
# Errors of a disk or a path, not of this project.
OF_DISK = (errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ENAMETOOLONG, errno.ELOOP)
PATH_ERRORS = (FileExistsError, FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError)
LOST = 3  # exit code after another process of the run was lost
GRACE_S = 10  # the first process of a run stays this long after an error, so that slower ones can report theirs
# Without PyTorch, which we do not need, transformers would print a warning at every start.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
CACHE_VARIABLE = "JAX_COMPILATION_CACHE_DIR"
CACHE_HOME = Path.home() / ".cache" / "psearch_jax"
DEFAULT_CACHE = CACHE_HOME / "xla"


def run(main: Callable[[list[str]], None], positional: bool = False, defaults: str = "") -> None:
    """Parses the flags, calls `main(argv)` and exits; bad input prints one line on stderr and exits with code 2.

    Args:
      main: gets the program's name and the arguments that are not flags.
      positional: whether to accept such arguments.
      defaults: config file whose fields `--config.SECTION.FIELD` can set without `--config`; "": `--config` is needed.
    """
    progress.show()

    def run_main(argv: list[str]) -> int:
        try:
            main(argv)
        except (UserError, CorpusError, RetrievalError, *PATH_ERRORS) as error:
            return _refuse(str(error))
        except BrokenPipeError:  # `| head` has read enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python's own flush at exit fails, too
            return PIPE_CLOSED
        except KeyboardInterrupt:
            return _refuse("interrupted by Ctrl-C", INTERRUPTED)
        except Exception as error:
            if isinstance(error, OSError) and error.errno in OF_DISK:
                return _refuse(str(error))
            if not is_store_error(error):
                raise
            return _refuse(f"{STORE}: cannot be reached, read or written ({' '.join(str(error).split())[:300]})")
        return 0

    def run_and_exit(argv: list[str]) -> int:
        try:
            code = run_main(argv)
        except Exception as error:
            if not jax.distributed.is_initialized():
                raise
            if processes.is_lost(error):
                reason = first_line(error)[:200]
                code = _refuse(f"the processes of this run lost each other ({reason}); the same commands resume", LOST)
            else:
                traceback.print_exc()
                code = 1
        if code and jax.distributed.is_initialized():
            sys.stdout.flush()
            sys.stderr.flush()
            if processes.first():  # its exit aborts the other processes, so let them print their own message
                time.sleep(GRACE_S)
            os._exit(code)  # a normal exit would deadlock: it waits for the other processes, which wait for this one
        return code

    app.run(run_and_exit, flags_parser=lambda argv: _parse(argv, positional, defaults))


def process_flags() -> None:
    """Defines the flags of a program that can run in several processes, which `configure_jax` joins."""
    flags.DEFINE_string("coordinator", "", "With several processes: HOST:PORT of process 0.")
    flags.DEFINE_integer("processes", 0, "With several processes: their number.")
    flags.DEFINE_integer("process", -1, "With several processes: the index of this one, from 0.")
    flags.DEFINE_bool("distributed", False, "Find the other processes by the environment: TPU pod, Slurm, Kubernetes.")


def require(*names: str) -> None:
    """The flags that every call must set, and not to "", as a shell variable without a value would."""
    flags.mark_flags_as_required(names)
    for name in names:
        flags.register_validator(
            name, lambda value: not isinstance(value, str | list) or bool(value), "found '', accepted: a value"
        )


def finite(name: str) -> None:
    """Refuses NaN for a float flag, which passes its bounds, and infinity."""
    flags.register_validator(name, math.isfinite, "accepted: a finite number")


def end_stopped(reason: str, by_user: bool) -> NoReturn:
    """Exits after a run was stopped: with `INTERRUPTED` after Ctrl-C, otherwise with 0."""
    print(f"interrupted: {reason}")
    sys.exit(INTERRUPTED if by_user else 0)


def server_flags(port: int) -> None:
    """Defines the flags of an HTTP server with default port `port`; `server_token` reads --token_file."""
    flags.DEFINE_string("host", "127.0.0.1", "Address to listen on; 0.0.0.0 listens on all networks of this machine.")
    flags.DEFINE_integer("port", port, "Port; 0 picks a free one.", 0, 65535)
    flags.DEFINE_string("token_file", None, "File with the bearer token that clients must send.")
    flags.DEFINE_integer("stop_seconds", 20, "Seconds that a stop waits for requests in flight.", 0)


def server_token() -> str | None:
    """The token in --token_file, or None if clients need no token. Raises as `read_token` does."""
    file = flags.FLAGS.token_file
    return read_token(file, "--token_file") if file else None


def configure_jax() -> None:
    """Enables the persistent compilation cache for all programs, sets up logging, and joins the other processes.

    The cache is in $JAX_COMPILATION_CACHE_DIR, by default in ~/.cache/psearch_jax/xla. Our log lines go to stderr as
    plain text. The other processes are those that the flags of `process_flags` describe.
    """
    jax.config.update("jax_compilation_cache_dir", os.environ.get(CACHE_VARIABLE) or str(DEFAULT_CACHE))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    for name in ("jax", "transformers", "httpx", "httpx2"):  # the last two log every request of the hub's client
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("huggingface_hub").propagate = False  # it has its own handler, and absl's would repeat each line
    logging.getLogger("absl").setLevel(logging.CRITICAL)  # Orbax logs every error here before it raises it
    if "coordinator" in flags.FLAGS and flags.FLAGS.is_parsed():
        values = flags.FLAGS
        processes.start(values.coordinator, values.processes, values.process, values.distributed)
    platforms.overlap_collectives(jax.distributed.is_initialized())
    if jax.distributed.is_initialized() and jax.default_backend() == "cpu":
        # CPU programs from the cache run their collectives in any order, which gloo aborts (seen with jax 0.10.2).
        jax.config.update("jax_enable_compilation_cache", False)
    logger = logging.getLogger("psearch_jax")
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stderr)
        several = jax.distributed.is_initialized()
        handler.setFormatter(
            logging.Formatter(f"process {jax.process_index()}: %(message)s" if several else "%(message)s")
        )
        logger.addHandler(handler)
        logger.setLevel(logging.WARNING if several and not processes.first() else logging.INFO)
        logger.propagate = False


def read_token(path: str, name: str) -> str:
    """Reads the single word in a file. Raises `UserError`, which names the flag or field `name`, otherwise."""
    try:
        words = Path(path).read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{name}={path}: cannot be read ({error})") from None
    if len(words) != 1:
        raise UserError(f"{name}={path}: found {len(words)} words, accepted: one, the token")
    if not (words[0].isascii() and words[0].isprintable()):  # an HTTP header cannot carry it
        raise UserError(f"{name}={path}: found other characters, accepted: printable ASCII")
    return words[0]


def _parse(argv: Sequence[str], positional: bool, defaults: str) -> list[str]:
    """Parses the flags and returns the remaining arguments; invalid flags end the program with exit code 2."""
    try:
        if defaults and _overrides(argv):
            flags.FLAGS.set_default("config", defaults)  # here, because it reads the overrides and refuses bad ones
        _check_config_file(argv)  # absl would report its errors in a traceback, or at the first use
        rest = flags.FLAGS(argv)
        if len(rest) > 1 and not positional:
            raise UserError(f"{rest[1]!r} found, accepted: flags only (--help lists them)")
    except (flags.Error, UserError) as error:
        sys.exit(_refuse(str(error)))
    except (AttributeError, KeyError) as error:  # of ml_collections, for an unknown field or section
        if not _overrides(argv):
            raise
        cause = error.args[0] if isinstance(error.args[0], KeyError) else error  # whose text would be quoted
        found = cause.args[0].replace("\nDid you mean", "; did you mean")
        sys.exit(_refuse(f"--config: unknown field {found}{_suggest(found)}"))
    return rest


def _suggest(message: str) -> str:
    """Fields of a run that an unknown field may mean, where ml_collections found none: by their end or initials."""
    if "did you mean" in message:
        return ""
    unknown, names = message.strip("'"), list(settings_of(Config))
    words = {name: name.rpartition(".")[2].split("_") for name in names}
    meant = [name for name in names if unknown in (words[name][-1], "".join(word[0] for word in words[name]))]
    return f"; did you mean {' or '.join(meant)}?" if meant else "; docs/configuration.md lists all fields"


def _check_config_file(argv: Sequence[str]) -> None:
    """Raises `UserError` unless the file of --config, if given, defines a `get_config` that returns a ConfigDict."""
    file = ""
    for argument, following in zip(argv, [*argv[1:], ""], strict=True):
        name, equals, value = argument.lstrip("-").partition("=")
        if name == "config" and argument.startswith("-"):
            file = value if equals else following
    path, _, argument = file.partition(":")
    if not path:
        return
    try:
        get_config = runpy.run_path(path).get("get_config") if path.endswith(".py") else None
        value = get_config and (get_config(argument) if argument else get_config())
    except UserError as error:
        raise UserError(f"--config={file}: {error}") from None
    except Exception as error:
        raise UserError(f"--config={file}: {type(error).__name__}: {first_line(error)}") from None
    if get_config is None:
        raise UserError(f"--config={file}: no get_config found, accepted: a Python file that defines it")
    if not isinstance(value, ConfigDict):
        found = type(value).__name__
        raise UserError(f"--config={file}: get_config returns {found}, accepted: an ml_collections.ConfigDict")


def _overrides(argv: Sequence[str]) -> bool:
    return any(argument.startswith(("--config.", "-config.")) for argument in argv)


def _refuse(message: str, code: int = BAD_INPUT) -> int:
    """Prints a message on one line, and each item of its list on another; returns `code`."""
    lines = (" ".join(line.split()) for line in message.split(ITEM))
    print(f"{Path(sys.argv[0]).stem}: {ITEM.join(lines)}", file=sys.stderr)
    return code
