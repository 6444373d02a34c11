"""Writes passages and questions in the toy policy's vocabulary, about people who do not occur in its training data.

    python examples/toy_questions.py --out=data

A name must consist of three syllables of the vocabulary, as those of `psearch_jax.closed_world.names.draw_names`;
other names are spelled, and the policy copies them wrongly. A year must be one of 1920 to 1979.
"""

import argparse
import json
from itertools import combinations
from pathlib import Path

import numpy as np

from psearch_jax.closed_world.encyclopedia import YEARS, fact_sentence
from psearch_jax.closed_world.names import draw_names, head

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Writes corpus.jsonl and questions.jsonl.")
    parser.add_argument("--out", type=Path, required=True, help="directory for the two files")
    parser.add_argument("--people", type=int, default=10, help="number of people, at most 40")
    parser.add_argument("--seed", type=int, default=0, help="another seed draws other names")
    flags = parser.parse_args()
    rng = np.random.default_rng(flags.seed)
    drawn = draw_names(rng, 4 * flags.people, "new")
    names = list({head(name): name for name in drawn}.values())[: flags.people]  # similar names are confused
    born = dict(zip(names, rng.choice(YEARS, len(names), replace=False).tolist(), strict=True))
    teachers = dict(zip(names, names[1:] + names[:1], strict=True))
    facts = [fact_sentence("birth year", name, str(year)) for name, year in born.items()]
    facts += [fact_sentence("teacher", name, teacher) for name, teacher in teachers.items()]
    asked = [
        (f"Which of {a} and {b} was born first?", min(a, b, key=born.__getitem__), "parallel")
        for a, b in combinations(names, 2)
    ]
    asked += [(f"In which year was {a}'s teacher born?", str(born[b]), "sequential") for a, b in teachers.items()]
    passages = [{"id": str(i), "title": "", "text": fact} for i, fact in enumerate(facts)]
    questions = [
        {"id": str(i), "question": text, "golden_answers": [answer], "metadata": {"type": kind}}
        for i, (text, answer, kind) in enumerate(asked)
    ]
    flags.out.mkdir(parents=True, exist_ok=True)
    for file, rows in (("corpus", passages), ("questions", questions)):
        (flags.out / f"{file}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print(f"{len(passages)} passages and {len(questions)} questions are in {flags.out}, such as: {asked[0][0]}")
