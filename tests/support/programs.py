"""Starts programs for tests: real processes, forked from a server that has already imported the common modules.

Importing jax, transformers and the rest takes longer than most programs of tests. So the first program of a session
starts a server (`python tests/support/programs.py SOCKET`) that imports them and waits; each program is a fork of it.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import runpy
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_WARM = (
    "psearch_jax.assembly.build",
    "psearch_jax.eval.benchmarks",
    "psearch_jax.eval.evaluate",
    "psearch_jax.report.page",
    "psearch_jax.train.trainer",
    "retrieval.indexing.directory",
    "retrieval.service",
    "scann",
    "tensorboardX",
    "tensorflow_datasets",
)


class Program:
    """A running program; what it shares with subprocess.Popen behaves alike.

    Args:
      arguments: [sys.executable,] script and flags; the script's path is relative to the repository.
      env: the complete environment; default: this process's.
      stdout, stderr: subprocess.PIPE or subprocess.DEVNULL.
    """

    def __init__(
        self,
        arguments: Sequence[object],
        env: Mapping[str, str] | None = None,
        stdout: int = subprocess.PIPE,
        stderr: int = subprocess.PIPE,
    ):
        self.args = [str(a) for a in arguments if str(a) != sys.executable]
        self.returncode: int | None = None
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(_server())
        request = {"argv": self.args, "env": dict(os.environ if env is None else env)}
        opened = [_stream(kind) for kind in (stdout, stderr)]
        self.stdout, self.stderr = (ours for ours, _ in opened)
        fds = [theirs for _, theirs in opened]
        message = json.dumps(request).encode()
        socket.send_fds(self._connection, [struct.pack("<I", len(message))], fds)
        self._connection.sendall(message)
        for fd in fds:
            os.close(fd)
        (self.pid,) = struct.unpack("<i", _exactly(self._connection, 4))

    def poll(self) -> int | None:
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self._connection.settimeout(timeout)
            try:
                (self.returncode,) = struct.unpack("<i", _exactly(self._connection, 4))
            except (TimeoutError, BlockingIOError):
                raise subprocess.TimeoutExpired(self.args, timeout or 0) from None
            self._connection.close()
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str | None, str | None]:
        """Waits for the end and returns the rest of stdout and stderr."""
        output: dict[int, str] = {}

        def read(number: int, stream) -> None:
            output[number] = stream.read()

        streams = [s for s in (self.stdout, self.stderr) if s is not None and not s.closed]
        readers = [threading.Thread(target=read, args=(id(s), s), daemon=True) for s in streams]
        for reader in readers:
            reader.start()
        self.wait(timeout)
        for reader in readers:
            reader.join(timeout)
        return tuple(output.get(id(s)) for s in (self.stdout, self.stderr))

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


def wait_until(condition: Callable[[], bool], seconds: float = 20) -> None:
    """Returns once the condition holds; fails after `seconds`."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def completed(
    arguments: Sequence[object], timeout: float = 600, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess:
    """Runs a program to its end, as subprocess.run with captured text does."""
    program = Program(arguments, env)
    try:
        out, err = program.communicate(timeout)
    except subprocess.TimeoutExpired:
        program.kill()
        raise
    return subprocess.CompletedProcess(program.args, program.returncode, out, err)


def tracked() -> list[str]:
    """The project's files, from git; skips the test outside a checkout."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        import pytest  # the server does not need it

        pytest.skip("this is no git checkout")
    return [name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]


def copied(names: Iterable[str], to: Path) -> None:
    """Copies files of the project into a directory."""
    for name in names:
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, to / name)


def refusal(command: Sequence[str]) -> str:
    """The error of a program that refuses a command line (script and flags); empty if it accepts it."""
    done = completed([sys.executable, *command, "--only_check_args"])
    return f"exit code {done.returncode}: {done.stderr[-500:]}" if done.returncode else ""


def _stream(kind: int):
    """(our end or None, the file descriptor for the program)."""
    if kind == subprocess.DEVNULL:
        return None, os.open(os.devnull, os.O_WRONLY)
    ours, theirs = os.pipe()
    return os.fdopen(ours, encoding="utf-8", errors="replace"), theirs


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = connection.recv(count - len(data))
        if not part:
            raise ConnectionError("the server of tests/support/programs.py is gone")
        data += part
    return data


@functools.cache
def _server() -> str:
    """Starts this process's server once and returns the path of its socket."""
    path = os.path.join(tempfile.mkdtemp(), "socket")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    server = subprocess.Popen(
        [sys.executable, __file__, path], cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
    )
    assert server.stdout.readline() == b"ready\n"
    atexit.register(server.kill)
    return path


# ---- the server ----


def _serve(path: str) -> None:
    for name in _WARM:
        __import__(name)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(64)
    listener.settimeout(1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # processes that answer a request are not waited for
    print("ready", flush=True)
    parent = os.getppid()
    while os.getppid() == parent:
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            continue
        if os.fork() == 0:
            listener.close()
            argv = _answer(connection)
            sys.argv = argv
            sys.path[0] = str(Path(argv[0]).resolve().parent)
            _run(argv[0])
        connection.close()


def _run(script: str) -> None:
    """Runs a script and ends this process as Python does: waits for threads, runs exit handlers, flushes streams.

    Only the imported modules are not freed, which would take two seconds.
    """
    code: object = 0
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as stop:
        code = stop.code or 0
        if not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(int(code) & 0xFF)


def _answer(connection: socket.socket) -> list[str]:
    """Returns in the new program's process, ready to run. Its parent process reports its pid and exit code."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    connection.setblocking(True)
    length, fds, _, _ = socket.recv_fds(connection, 4, 2)
    request = json.loads(_exactly(connection, struct.unpack("<I", length)[0]))
    child = os.fork()
    if child:
        for fd in fds:
            os.close(fd)
        try:
            connection.sendall(struct.pack("<i", child))
            _, status = os.waitpid(child, 0)
            connection.sendall(struct.pack("<i", os.waitstatus_to_exitcode(status)))
        finally:
            os._exit(0)
    connection.close()
    for fd, number in zip(fds, (1, 2), strict=True):
        os.dup2(fd, number)
        os.close(fd)
    os.environ.clear()
    os.environ.update(request["env"])
    return request["argv"]


if __name__ == "__main__":
    _serve(sys.argv[1])
