"""The files of launch/deploy: commands are accepted, probes answered, mounts used, and stops finish in time."""

from __future__ import annotations

import json
import math
import os
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml
from helpers import people
from programs import ROOT, Program, copied, refusal, tracked
from runs import command, wait_for
from serving import HTTP

from psearch_jax.runtime import cli
from retrieval.corpus import MemoryMappedCorpus, write_corpus
from retrieval.encoders.hashing import HashingEncoder
from retrieval.indexing.directory import build_index

DEPLOY = ROOT / "launch" / "deploy"
TOKEN = {"authorization": "Bearer s3cret"}


def instructions(name: str) -> list[str]:
    """The arguments of all Dockerfile instructions of one kind, with continued lines joined."""
    text = re.sub(r"^\s*#.*\n", "", (DEPLOY / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", "")
    return [line.split(None, 1)[1].strip() for line in text.splitlines() if line.startswith(f"{name} ")]


def manifests(name: str) -> list[dict]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


def unit(name: str) -> dict[str, str]:
    """The settings of a systemd unit, with continued lines joined."""
    lines = (DEPLOY / name).read_text().replace("\\\n", " ").splitlines()
    return dict(line.split("=", 1) for line in lines if re.match(r"\w+=", line))


@dataclass
class Start:
    """A command that one of the files starts."""

    command: list[str]
    mounts: list[str] = field(default_factory=list)  # where host files are mounted
    grace_s: float = math.inf  # from SIGTERM to SIGKILL
    probes: list[tuple[int, str]] = field(default_factory=list)  # port and path

    def flag(self, name: str) -> str | None:
        values = [word.split("=", 1)[1] for word in self.command if word.startswith(f"--{name}=")]
        return values[0] if values else None

    @property
    def serves(self) -> bool:
        return "serve_" in self.command[1]


def health(check: list[str]) -> tuple[int, str]:
    """The port and path that a health check requests."""
    return int(re.search(r"'127\.0\.0\.1', (\d+)", check[-1])[1]), re.search(r"'GET', '([^']+)'", check[-1])[1]


HEALTHCHECK = json.loads(re.search(r"\[.*\]", instructions("HEALTHCHECK")[0])[0])
HOME = re.search(r"HOME=(\S+)", instructions("ENV")[0])[1]


def starts() -> dict[str, Start]:
    image = health(HEALTHCHECK)
    by_name = {"Dockerfile": Start(json.loads(instructions("CMD")[0]), ["/index"], probes=[image])}
    for name, service in manifests("compose.yaml")[0]["services"].items():
        mounts = [volume.removesuffix(":ro").rsplit(":", 1)[1] for volume in service["volumes"]]
        mounts += [f"/run/secrets/{secret}" for secret in service.get("secrets", [])]
        check = service.get("healthcheck", {})
        probes = [] if check.get("disable") else [health(check["test"]) if check else image]
        grace = service.get("stop_grace_period", "inf")
        seconds = float(grace.rstrip("sm")) * (60 if grace.endswith("m") else 1)
        by_name[f"compose.yaml {name}"] = Start(service["command"], mounts, seconds, probes)
    for path in sorted(DEPLOY.glob("*.service")):
        settings = unit(path.name)
        words = ["python", *shlex.split(settings["ExecStart"])[1:]]
        secrets = re.findall(r"^LoadCredential=(\w+):", path.read_text(), re.MULTILINE)
        mounts = [settings["ReadOnlyPaths"], *(f"${{CREDENTIALS_DIRECTORY}}/{secret}" for secret in secrets)]
        by_name[path.name] = Start(words, mounts, float(settings["TimeoutStopSec"]))
    for path in sorted(DEPLOY.glob("gke-*.yaml")):
        for pod in (m["spec"]["template"]["spec"] for m in manifests(path.name) if "template" in m["spec"]):
            (container,) = pod["containers"]
            mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
            ports = {port["name"]: port["containerPort"] for port in container.get("ports", [])}
            gets = [container[kind]["httpGet"] for kind in container if kind.endswith("Probe")]
            sleep = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", [0])[-1]
            grace = pod["terminationGracePeriodSeconds"] - float(sleep)
            probes = [(ports[get["port"]], get["path"]) for get in gets]
            assert "command" not in container, "a command would replace tini"
            by_name[path.name] = Start(container["args"], mounts, grace, probes)
    return by_name


STARTS = starts()
SERVERS = {name: start for name, start in STARTS.items() if start.serves}


def test_every_file_starts_something():
    """The command of a file is no longer extracted, so that nothing in this file is tested."""
    files = {path.name for path in DEPLOY.iterdir() if not path.name.endswith("_token")}
    assert {name.split()[0] for name in STARTS} == files
    assert len(SERVERS) == 6 and sum(bool(start.probes) for start in STARTS.values()) == 4


@pytest.mark.parametrize("name", STARTS)
def test_every_command_is_taken(name):
    """A flag is renamed, and containers exit as soon as they start."""
    assert STARTS[name].command[0] == "python"
    assert not refusal(STARTS[name].command[1:])


@pytest.mark.parametrize("name", STARTS)
def test_a_command_reads_what_is_mounted(name):
    """A command uses a path outside every mount, or a mount that no command uses: files are missing or lost."""
    start = STARTS[name]
    values = [word.split("=", 1)[1] for word in start.command if "=" in word]
    read = [value for value in values if value.startswith(("/", "$"))]
    mounts = [mount for mount in start.mounts if mount not in (f"{HOME}/.cache", "/tmp")]
    assert mounts and all(any(f"{path}/".startswith(f"{mount}/") for mount in mounts) for path in read), read
    assert all(any(f"{path}/".startswith(f"{mount}/") for path in read) for mount in mounts), mounts


@pytest.mark.parametrize("name", SERVERS)
def test_probes_ask_the_port_that_is_served_and_stops_are_waited_for(name):
    """A probe of another port is never answered, or a grace period below the server's own cuts replies off."""
    start = SERVERS[name]
    assert all(port == int(start.flag("port")) for port, _ in start.probes)
    assert start.flag("host") == "0.0.0.0" and start.grace_s > int(start.flag("stop_seconds")) + 3
    assert name == "Dockerfile" or start.flag("token_file"), "anyone who reaches it can use it without a token"


def test_clients_ask_the_addresses_that_are_served():
    """Service name, port or token differ between client and server: the trainer waits for minutes and exits."""
    compose, gke = "compose.yaml {}".format, STARTS["gke-retriever.yaml"]
    service = next(m for m in manifests("gke-retriever.yaml") if m["kind"] == "Service")
    deployment = next(m for m in manifests("gke-retriever.yaml") if m["kind"] == "Deployment")
    port = STARTS[compose("retriever")].flag("port")
    wanted = f"http://retriever:{port}/retrieve", STARTS[compose("retriever")].flag("token_file")
    train, agent = STARTS[compose("trainer")], STARTS[compose("agent")]
    assert (train.flag("config.retrieval.url"), train.flag("config.retrieval.token_file")) == wanted
    assert (agent.flag("retriever_url"), agent.flag("config.retrieval.token_file")) == wanted
    assert agent.flag("model") == train.flag("workdir")
    local = f"http://127.0.0.1:{STARTS['psearch-retriever.service'].flag('port')}/retrieve"
    assert STARTS["psearch-agent.service"].flag("retriever_url") == local
    assert service["spec"]["selector"] == deployment["spec"]["template"]["metadata"]["labels"]
    assert str(service["spec"]["ports"][0]["port"]) == gke.flag("port")
    url = f"http://{service['metadata']['name']}:{gke.flag('port')}/retrieve"
    assert STARTS["gke-tpu-train.yaml"].flag("config.retrieval.url") == url


def test_the_job_fits_its_slice():
    """The topology changes but the number of pods does not: hosts stay idle, or processes wait for each other."""
    service, job = manifests("gke-tpu-train.yaml")
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    chips = math.prod(map(int, pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"].split("x")))
    limits = pod["containers"][0]["resources"]["limits"]
    assert spec["parallelism"] == spec["completions"] == chips // limits["google.com/tpu"] > 1
    assert spec["completionMode"] == "Indexed" and pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["selector"] == {
        "job-name": job["metadata"]["name"]
    }
    start = STARTS["gke-tpu-train.yaml"]
    assert "--distributed" in start.command and start.flag("workdir").startswith("gs://")
    config = runpy.run_path(str(ROOT / start.flag("config")))["get_config"]()
    assert config.rollout.slots % spec["parallelism"] == config.train.prompts % spec["parallelism"] == 0
    assert chips % config.mesh.tensor == 0
    codes = [rule["onExitCodes"]["values"] for rule in spec["podFailurePolicy"]["rules"] if "onExitCodes" in rule]
    killed = [128 + number for number in (signal.SIGABRT, signal.SIGTERM)]  # by JAX; while the program loads
    assert codes == [[cli.LOST, int(start.flag("stopped_code")), *killed]]


# ---- the image ----


def kept(path: str, rules: list[str]) -> bool:
    """Whether .dockerignore keeps a file in the context: the last rule that matches it or a parent decides."""
    included, parts = True, path.split("/")
    for rule in rules:
        pattern = re.escape(rule.lstrip("!")).replace(r"\*\*/", "(?:.*/)?").replace(r"\*", "[^/]*")
        if any(re.fullmatch(pattern, "/".join(parts[:n])) for n in range(1, len(parts) + 1)):
            included = rule.startswith("!")
    return included


@pytest.fixture(scope="module")
def files() -> list[str]:
    return tracked()


RULES = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]


@pytest.fixture(scope="module")
def image(files, tmp_path_factory) -> Path:
    """The files of the image, except those that pip installs, according to .dockerignore and the COPY lines."""
    context, root = tmp_path_factory.mktemp("context"), tmp_path_factory.mktemp("image")
    copied((path for path in files if kept(path, RULES)), context)
    for line in instructions("COPY"):
        source, target = line.split()
        copy = shutil.copytree if (context / source).is_dir() else shutil.copy
        copy(context / source, root / target)
    return root


def test_the_image_holds_the_programs_and_nothing_of_its_users(image, files):
    """A directory is not copied, and the first command to need it fails; or a token is copied and published."""
    there = {str(path.relative_to(image)) for path in image.rglob("*") if path.is_file()}
    needed = {p for p in files if p.startswith(("configs/", "launch/", "psearch_jax/", "retrieval/"))}
    assert needed - there == {p for p in files if p.startswith("launch/deploy/")}
    assert there - needed == {"setup.py"}
    private = (".git/config", ".venv/bin/python", "runs/a/config.json", "launch/deploy/agent_token", "index/main/x")
    assert not [path for path in (*private, "psearch_jax/text/__pycache__/tags.pyc") if kept(path, RULES)]


def test_dependencies_are_read_from_setup_py_alone(image, tmp_path):
    """The image layer of the dependencies fails to build, or lacks the libraries of an accelerator."""
    shutil.copyfile(image / "setup.py", tmp_path / "setup.py")
    (tmp_path / "README.md").touch()
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run([*pip, f"--target={tmp_path / 'to'}", "."], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    (metadata,) = (tmp_path / "to").glob("*.dist-info/METADATA")
    text = metadata.read_text()
    offered = set(re.findall(r"^Provides-Extra: (\S+)", text, re.MULTILINE))
    asked = re.findall(r"EXTRAS[=:] ?([\w,]+)", "".join(path.read_text() for path in DEPLOY.iterdir()))
    assert {"cuda", "tpu,gcs"} <= set(asked) and {name for one in asked for name in one.split(",")} <= offered
    assert "Requires-Dist: scann" in text


# ---- running servers ----


@dataclass
class Server:
    """The retriever of compose.yaml, started from the image's files with local paths and a free port."""

    process: subprocess.Popen
    port: int
    url: str


@pytest.fixture
def place(tmp_path) -> Path:
    """A directory with an index of a small corpus and a token."""
    write_corpus(tmp_path / "people.jsonl", people())
    corpus = MemoryMappedCorpus(tmp_path / "people.jsonl")
    build_index(tmp_path / "index", corpus, HashingEncoder(256).fit(corpus))
    (tmp_path / "token").write_text("s3cret\n")
    return tmp_path


@pytest.fixture
def retriever(image, place) -> Iterator[Server]:
    start = STARTS["compose.yaml retriever"]
    here = {start.flag("index"): place / "index", start.flag("token_file"): place / "token"}
    words = start.command[1:]
    for there, path in here.items():
        words = [word.replace(f"={there}", f"={path}") for word in words]
    words = [word.replace(f"--port={start.flag('port')}", "--port=0") for word in words]
    environment = {**os.environ, "PYTHONPATH": str(image), "HOME": str(place)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, *words], cwd=image, env=environment, **pipes)
    try:
        line = process.stdout.readline()
        assert line.startswith("serving 320 passages on http://0.0.0.0:"), line + process.stderr.read()
        port = int(re.search(r":(\d+)/", line)[1])
        yield Server(process, port, f"http://127.0.0.1:{port}")
    finally:
        process.kill()
        process.communicate()


def checked(check: list[str], port: int) -> int:
    """The exit code of a health check that is sent to another port."""
    own, _ = health(check)
    return subprocess.run([sys.executable, *check[1:-1], check[-1].replace(str(own), str(port))]).returncode


def test_probes_are_answered_with_a_token_set_and_sigterm_ends_in_time(retriever):
    """Probes are refused without the token and the server is killed, or an ignored SIGTERM loses open requests."""
    start, port = STARTS["compose.yaml retriever"], retriever.port
    request = {"queries": ["Baro Quill born"], "topk": 1}
    refused = HTTP.request("POST", f"{retriever.url}/retrieve", json=request)
    answered = HTTP.request("POST", f"{retriever.url}/retrieve", json=request, headers=TOKEN)
    assert refused.status == 401 and answered.json()["result"][0][0]["id"] == "p0"
    paths = {path for one in SERVERS.values() for _, path in one.probes}
    assert [HTTP.request("GET", retriever.url + path).status for path in paths] == [200]
    assert checked(HEALTHCHECK, port) == 0
    retriever.process.send_signal(signal.SIGTERM)
    assert retriever.process.wait(start.grace_s) == 0
    assert "Traceback" not in retriever.process.stderr.read()
    assert checked(HEALTHCHECK, port) != 0


def test_an_agent_searches_in_a_retriever_that_asks_for_a_token(retriever, place):
    """The agent server is healthy but every answer fails, because it does not have the retriever's token."""
    start = STARTS["compose.yaml agent"]
    here = {"model": "toy", "retriever_url": f"{retriever.url}/retrieve", "port": "0"}
    here |= {name: place / "token" for name in ("token_file", "config.retrieval.token_file")}
    words = start.command[1:]
    for name, value in here.items():
        words = [word if not word.startswith(f"--{name}=") else f"--{name}={value}" for word in words]
    program = Program([sys.executable, *words, "--slots=2"], stderr=subprocess.DEVNULL)
    try:
        url = "http://127.0.0.1:" + re.search(r":(\d+)/", program.stdout.readline())[1]
        check = manifests("compose.yaml")[0]["services"]["agent"]["healthcheck"]["test"][1:]
        request = {
            "messages": [{"role": "user", "content": "Are the setting of Gamudol and the rival of Pujazas the same?"}]
        }
        answer = HTTP.request("POST", f"{url}/v1/chat/completions", json=request, headers=TOKEN, timeout=120)
        assert answer.status == 200, answer.data
        assert checked(check, int(url.rsplit(":", 1)[1])) == 0
        metrics = HTTP.request("GET", f"{retriever.url}/metrics", headers=TOKEN).data.decode()
        assert 'retriever_requests_total{status="200"}' in metrics
        program.terminate()
        assert program.wait(start.grace_s) == 0
    finally:
        program.kill()


def test_a_stopped_run_is_not_taken_for_done(tiny_policy, tmp_path):
    """A Kubernetes Job takes exit code 0 as completion, so that a run does not resume after a node is drained."""
    code = STARTS["gke-tpu-train.yaml"].flag("stopped_code")
    run = Program([*command(tmp_path, tiny_policy, 1000), f"--stopped_code={code}"])
    try:
        wait_for(lambda: (tmp_path / "trajectories" / "000001.jsonl").is_file(), run)
        run.terminate()
        out, err = run.communicate(300)
        assert run.returncode == int(code) and "interrupted: saved after step" in out, err[-2000:]
    finally:
        run.kill()


# ---- linters, if installed ----


def tool(name: str) -> str:
    """The path of a program; skips the test if it is not installed."""
    path = shutil.which(name, path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    if path is None:
        pytest.skip(f"{name} is not installed")
    return path


@pytest.mark.parametrize(
    ("words", "files"),
    [
        (["hadolint"], "launch/deploy/Dockerfile"),
        (["kubernetes-validate", "--strict"], "launch/deploy/gke-*.yaml"),
        (["check-jsonschema", "--builtin-schema=vendor.compose-spec"], "launch/deploy/compose.yaml"),
        (["check-jsonschema", "--builtin-schema=vendor.github-workflows"], ".github/workflows/*.yml"),
        (["check-jsonschema", "--builtin-schema=vendor.citation-file-format"], "CITATION.cff"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_linters_find_nothing(words, files):
    """A misspelt field is silently ignored by the program that loads the file."""
    paths = sorted(map(str, ROOT.glob(files)))
    done = subprocess.run([tool(words[0]), *words[1:], *paths], capture_output=True, text=True)
    assert paths and done.returncode == 0, done.stdout + done.stderr


def test_systemd_knows_every_setting_of_the_units(tmp_path):
    """systemd only logs a misspelt setting, and the server runs without the protection that it should give."""
    paths = []
    for path in sorted(DEPLOY.glob("*.service")):
        paths.append(tmp_path / path.name)
        paths[-1].write_text(path.read_text().replace("/opt/psearch/.venv/bin/python", sys.executable))
    done = subprocess.run([tool("systemd-analyze"), "verify", "--man=no", *paths], capture_output=True, text=True)
    warnings = [line for line in done.stderr.splitlines() if "psearch-" in line]  # ignores other units
    assert len(paths) == 2 and not warnings, warnings
