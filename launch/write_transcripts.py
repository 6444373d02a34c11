"""Writes scripted transcripts for launch/sft.py, with the passages that the run's retriever returns.

    python launch/write_transcripts.py --config=configs/qwen0p5b_cpu.py --config.retrieval.corpus=CORPUS.jsonl \\
        --questions=DIR --count=500 --out=transcripts.jsonl

The questions need evidence triples: a directory that launch/prepare_data.py made from triples, or a 2WikiMultiHopQA
file. Of the model, only the tokenizer is loaded, to cut passages as a rollout does (config.rollout.obs_tokens). Of the
questions of every kind, the share --split_share has a first search that is split into sub-queries.
psearch_jax/data/scripted_transcripts.py explains what the transcripts teach and what they leave open.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from absl import flags
from ml_collections import config_flags

from psearch_jax.runtime import cli
from psearch_jax.runtime.paths import check_new, make_writable, on_disk, packaged, write_atomically
from psearch_jax.types import KINDS, UserError, pair_calls
from retrieval.protocol import Passage, in_utf8

CONFIG = config_flags.DEFINE_config_file("config", None, "The run that the transcripts are for.")
QUESTIONS = flags.DEFINE_list("questions", None, "Question files or prepared directories, separated by commas.")
COUNT = flags.DEFINE_integer("count", 500, "Maximum number of transcripts to write.", lower_bound=1)
SPLIT = flags.DEFINE_float("split_share", 0.5, "Share of questions to split, the same for every kind.", 0.0, 1.0)
CORRECTIONS = flags.DEFINE_float(
    "correction_share", 0.1, "Share to begin with incomplete names, if a search for them finds no fact.", 0.0, 1.0
)
SEED = flags.DEFINE_integer(
    "seed", 0, "Seed for choosing the questions, their wordings, and which of them are split.", 0
)
OUT = flags.DEFINE_string("out", None, "The jsonl file to write.")
cli.finite("split_share")
cli.finite("correction_share")
cli.require("config", "questions", "out")


def main(_: list[str]) -> None:
    import json

    import numpy as np
    from tqdm import tqdm

    from psearch_jax.assembly import build
    from psearch_jax.assembly.tools import make_dialect
    from psearch_jax.config import from_mapping, with_method
    from psearch_jax.data.held_out import without_held_out
    from psearch_jax.data.prepared import open_questions
    from psearch_jax.data.scripted_transcripts import Alternation, TranscriptWriter, transcript_row
    from psearch_jax.data.transcripts import TranscriptTurn
    from psearch_jax.eval.tables import table
    from psearch_jax.limits import validate
    from psearch_jax.text.evidence import rounds_of
    from psearch_jax.text.tokenizer import Tokenizer

    cli.configure_jax()
    out, config = on_disk(OUT.value, "--out"), with_method(from_mapping(CONFIG.value.to_dict()))
    validate(config, training=False)
    check_new(out, "a new file", "--out=")
    make_writable(out.parent)
    share = config.data.validation_share
    questions = [q for location in QUESTIONS.value for q in without_held_out(open_questions(location), share)]
    usable = [question for question in questions if rounds_of(question)]
    if not usable:
        raise UserError(
            f"--questions={','.join(QUESTIONS.value)}: none of {len(questions)} questions has evidence triples, "
            "accepted: a directory made from triples by launch/prepare_data.py, or rows with metadata.evidences. For "
            "plain questions, a model writes transcripts: launch/sample.py --template=examples"
        )
    section = config.retrieval
    if not section.passages:
        raise UserError("config.retrieval: no passages named, accepted: index, corpus or url")
    tokenizer = Tokenizer.load(packaged(config.model.tokenizer or config.model.path))
    dialect, retriever = make_dialect(config, tokenizer), build.make_retriever(config, None)

    def search(queries: Sequence[str]) -> list[list[Passage]]:
        return [list(map(in_utf8, ranking)) for ranking in retriever.search(list(queries), section.topk)]

    def observe(queries: Sequence[str], rankings: Sequence[Sequence[Passage]]) -> str:
        return tokenizer.decode(dialect.observe(pair_calls((), queries), rankings).ids)

    def fits(turn: TranscriptTurn) -> bool:
        return len(dialect.encode_reply(turn.text, bool(turn.calls))) <= config.rollout.turn_tokens

    rng = np.random.default_rng([SEED.value, 0x7EAC])
    search_turns = config.rollout.search_turns
    writer = TranscriptWriter(
        search, observe, dialect.write_calls, fits, search_turns, section.max_sub_queries, CORRECTIONS.value
    )
    alternation = Alternation(SPLIT.value if section.max_sub_queries > 1 else 0.0, rng)
    rows, left_out = [], 0
    written: Counter[str] = Counter()
    split: Counter[str] = Counter()
    with tqdm(total=COUNT.value, unit="transcript", disable=None) as bar:
        for i in rng.permutation(len(usable)):
            wording = np.random.default_rng([SEED.value, 0x7EAD, int(i)])
            turns = writer.write(usable[i], alternation.possible, wording)
            if not turns:
                left_out += 1
                continue
            kind = usable[i].kind
            is_split = alternation.next(kind)
            rows.append(json.dumps(transcript_row(usable[i], turns[is_split]), ensure_ascii=False) + "\n")
            written[kind] += 1
            split[kind] += is_split
            bar.update()
            if len(rows) == COUNT.value:
                break
    if not rows:
        raise UserError(
            f"--questions: no transcript of {left_out} questions is possible, because the passages shown do not state "
            "their facts or a turn is too long; see retrieval.topk, rollout.obs_tokens and rollout.turn_tokens"
        )
    write_atomically(out, "".join(rows))
    lines = [[kind, str(written[kind]), f"{split[kind] / written[kind]:.2f}"] for kind in KINDS if written[kind]]
    print(table([["kind", "transcripts", "split"], *lines]))
    print(
        f"{out}: {len(rows)} transcripts; {left_out} questions were left out because the passages shown do not "
        f"state their facts, they take more than {search_turns} searches, or a turn is longer than "
        f"{config.rollout.turn_tokens} tokens"
    )


if __name__ == "__main__":
    cli.run(main)
