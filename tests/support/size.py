"""Prints the size of the present tree: lines of code and documentation, megabytes, config fields, long files.

python tests/support/size.py
"""

import subprocess
import sys
from dataclasses import fields, is_dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
LIMIT = 450  # lines of a file of the package
GROUPS = {
    "psearch_jax + retrieval, lines of Python": (".py", "psearch_jax", "retrieval"),
    "launch + configs + examples, lines of Python": (".py", "launch", "configs", "examples"),
    "tests, lines of Python": (".py", "tests"),
    "benchmarks + experiments, lines of Python": (".py", "benchmarks", "experiments"),
    "docs and README, lines of Markdown": (".md", "docs", "README.md"),
}


def count_fields(value: object) -> int:
    """Fields of a config, without the sections themselves."""
    return sum(count_fields(part) if is_dataclass(part := getattr(value, f.name)) else 1 for f in fields(value))


def main() -> None:
    from psearch_jax.config import Config

    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    contents = {name: (ROOT / name).read_bytes() for name in listed.splitlines() if (ROOT / name).is_file()}
    lines = {name: content.count(b"\n") for name, content in contents.items()}
    for title, (suffix, *folders) in GROUPS.items():
        total = sum(n for name, n in lines.items() if name.endswith(suffix) and name.split("/")[0] in folders)
        print(f"| {title} | {total} |")
    print(f"| working tree without .git, MB | {sum(map(len, contents.values())) / 1e6:.1f} |")
    print(f"| config fields | {count_fields(Config())} |")
    package = [n for n in lines if n.endswith(".py") and n.startswith(("psearch_jax/", "retrieval/"))]
    long = [f"{name} ({lines[name]})" for name in package if lines[name] > LIMIT]
    print(f"| files of the package above {LIMIT} lines | {', '.join(long) or 'none'} |")


if __name__ == "__main__":
    main()
