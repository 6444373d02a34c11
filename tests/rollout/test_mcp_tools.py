"""Tools of a real MCP server, over stdio and HTTP: found, called in parallel, and lost without ending a run."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest
from calls import ADA, give, tool_collector
from helpers import question, random_params
from programs import wait_until
from runs import free_port
from written import CONFIG

from psearch_jax.rollout.tools import Tool, Toolbox
from psearch_jax.text.tool_calls import write_calls
from psearch_jax.types import TOOL_ERROR, Call, UserError

pytest.importorskip("mcp", reason="the MCP SDK is not installed")

from psearch_jax.rollout.mcp_tools import open_server  # noqa: E402

SERVER = '''
import os, sys, time
from mcp import MCPError
from mcp.server.mcpserver import MCPServer
from mcp.types import INVALID_PARAMS

server = MCPServer("people")


@server.tool()
def born(name: str) -> str:
    """The year of birth of a person."""
    time.sleep(0.3)
    return {"Ada": "1815", "Alan": "1912"}[name]


@server.tool()
def died(name: str) -> str:
    """Answers no call, but with an error of the protocol."""
    raise MCPError(INVALID_PARAMS, "unknown person")


@server.tool()
def wait(seconds: float) -> str:
    """Does nothing for a while."""
    time.sleep(seconds)
    return "done"


@server.tool()
def process() -> int:
    """The number of this process."""
    return os.getpid()


server.run(*sys.argv[1:2], **({"port": int(sys.argv[2])} if sys.argv[2:] else {}))
'''
CALLS = {0: (Call("born", '{"name": "Ada"}'), Call("born", '{"name": "Alan"}'), Call("process", "{}"))}


@pytest.fixture(params=["stdio", "streamable-http"])
def target(request, tmp_path) -> Iterator[str]:
    file = tmp_path / "server.py"
    file.write_text(SERVER)
    if request.param == "stdio":
        yield f"{sys.executable} {file} stdio"
        return
    port = free_port()
    command = [sys.executable, str(file), request.param, str(port)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as server:
        wait_until(lambda: accepts(port), 30)
        yield f"http://127.0.0.1:{port}/mcp"
        server.kill()


def accepts(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def results(tools) -> list[str]:
    return [passage.text for (passage,) in tools.run(CALLS)[0]]


def test_a_server_that_is_killed_ends_no_run(target):
    """Its calls fail, in one line each; the command is started again, a server at a URL is not. A server that refuses
    a call is not lost."""
    tools = Toolbox(None, 1, open_server(target, 5.0))
    assert {tool.name: tool.description for tool in tools.tools} == {
        "born": "The year of birth of a person.",
        "died": "Answers no call, but with an error of the protocol.",
        "wait": "Does nothing for a while.",
        "process": "The number of this process.",
    }
    ada, alan, pid = results(tools)
    assert (ada, alan) == ("1815", "1912")
    failed = Toolbox(None, 1, tools.tools).run({0: (Call("born", '{"name": "Bob"}'), Call("born", "{}"))})[0]
    assert all(p.id == TOOL_ERROR and p.text.startswith("error: ") for (p,) in failed)
    calls = (Call("died", '{"name": "Ada"}'), CALLS[0][2])
    assert [p.text for (p,) in tools.run({0: calls})[0]] == ["error: unknown person", pid]  # the same process
    os.kill(int(pid), signal.SIGKILL)
    assert all(text.startswith("error: ConnectionError: ") for text in results(tools)[:2])
    if "http" not in target:
        assert results(tools)[:2] == ["1815", "1912"]


def test_a_server_that_is_killed_in_a_rollout(tiny_tokenizer, tmp_path):
    """Rollouts call it at once, lose it between two calls, wait for it in vain, and go on to their answers."""
    (tmp_path / "server.py").write_text(SERVER)
    pid = tmp_path / "pid"
    tools = open_server(f"sh -c 'echo $$ > {pid}; exec {sys.executable} {tmp_path / 'server.py'} stdio'", 2.0)
    kill = Tool("kill", "", {}, lambda calls: [str(os.kill(int(pid.read_text()), signal.SIGKILL))] * len(calls))
    collector = tool_collector(tiny_tokenizer, (*tools, kill), search_turns=5)
    ada, alan = Call("born", '{"name": "Ada"}'), Call("born", '{"name": "Alan"}')
    wait = Call("wait", '{"seconds": 9}')
    turns = [[ada, alan], [Call("kill", "{}")], [ada, ADA], [ada, alan], [ada, wait]]
    script = [*(write_calls(calls) for calls in turns), "<answer>1815</answer>"]
    questions = [question(i, "?") for i in range(2)]
    give(collector, 0, [(q, 0) for q in questions], [script, [script[0], script[-1]]])
    stream = collector.stream(1, 0)
    stream.add(questions, 0)
    killed, other = stream.collect(lambda: collector.sampler.weights(random_params(CONFIG, seed=2)), 0, 1.0)
    assert killed.status == other.status == "answered" and killed.answer == "1815"
    shown = [turn.shown for turn in killed.executed]
    assert shown[0] == other.turns[0].shown == shown[3] == (("1815",), ("1912",))
    assert shown[2][0][0].startswith("error: ConnectionError") and shown[2][1] == ("Ada Lovelace was born in 1815.",)
    assert shown[4] == (("1815",), ("error: no response in 2 s",))
    usage = stream.spent()
    assert usage.tool_timeouts == 1 and usage.tool_errors == 2


def test_what_is_no_server_is_refused():
    with pytest.raises(UserError, match="config.rollout.tools=mcp:.*: its tools could not be listed"):
        open_server(f"{sys.executable} -c pass", 1.0)
