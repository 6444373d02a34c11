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


def tracked_files() -> list[Path]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [file for name in listed.stdout.splitlines() if (file := ROOT / name).is_file()]


def count_lines(files: list[Path]) -> int:
    return sum(file.read_bytes().count(b"\n") for file in files)


def count_fields(value: object) -> int:
    """Fields of a config, without the sections themselves."""
    return sum(count_fields(part) if is_dataclass(part := getattr(value, f.name)) else 1 for f in fields(value))


def main() -> None:
    from psearch_jax.config import Config

    files = tracked_files()

    def in_folders(suffix: str, *folders: str) -> list[Path]:
        return [f for f in files if f.suffix == suffix and f.relative_to(ROOT).parts[0] in folders]

    package = in_folders(".py", "psearch_jax", "retrieval")
    long = [f"{file.relative_to(ROOT)} ({count_lines([file])})" for file in package if count_lines([file]) > LIMIT]
    rows = {
        "psearch_jax + retrieval, lines of Python": count_lines(package),
        "launch + configs + examples, lines of Python": count_lines(
            in_folders(".py", "launch", "configs", "examples")
        ),
        "tests, lines of Python": count_lines(in_folders(".py", "tests")),
        "benchmarks + experiments, lines of Python": count_lines(in_folders(".py", "benchmarks", "experiments")),
        "docs and README, lines of Markdown": count_lines([*in_folders(".md", "docs"), ROOT / "README.md"]),
        "working tree without .git, MB": round(sum(file.stat().st_size for file in files) / 1e6, 1),
        "config fields": count_fields(Config()),
        f"files of the package above {LIMIT} lines": ", ".join(long) or "none",
    }
    for name, value in rows.items():
        print(f"| {name} | {value} |")


if __name__ == "__main__":
    main()
