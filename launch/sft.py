"""Makes the toy policy: `python launch/sft.py --config=configs/toy_sft.py --workdir=DIR`.

DIR/policy is the result, in Hugging Face format; DIR/config.json holds the settings, DIR/metrics.jsonl what was
learned of each skill. The same command goes on where it was stopped.
"""

import dataclasses
import json

from absl import flags
from ml_collections import config_flags

from psearch_jax import launching

CONFIG = config_flags.DEFINE_config_file("config", None, "The cold start: a file like configs/toy_sft.py.")
WORKDIR = flags.DEFINE_string("workdir", None, "The directory to write to; made if absent.")
flags.mark_flags_as_required(["config", "workdir"])


def main(_: list[str]) -> None:
    from psearch_jax.config import from_mapping
    from psearch_jax.data.toy_tokenizer import write_tokenizer
    from psearch_jax.metrics import MetricsWriter, cut_jsonl
    from psearch_jax.models.hf import save_hf
    from psearch_jax.paths import make_writable, on_disk, write_whole
    from psearch_jax.text.tokenizer import Tokenizer
    from psearch_jax.train import sft
    from psearch_jax.train.checkpoint import find_checkpoint
    from psearch_jax.types import UserError
    from retrieval.service import RetrievalService

    config = from_mapping(CONFIG.value.to_dict(), sft.SFTConfig)
    workdir = on_disk(WORKDIR.value, "--workdir")
    policy, settings = workdir / "policy", workdir / "config.json"
    if policy.exists():
        raise UserError(f"{policy}: exists already, accepted: a --workdir without a policy")
    launching.configure_jax()
    make_writable(workdir)
    told = json.dumps(dataclasses.asdict(config), indent=2) + "\n"
    if settings.exists() and settings.read_text(encoding="utf-8") != told:
        raise UserError(
            f"{settings}: found other settings than are asked for, accepted: the same, or another --workdir"
        )
    write_whole(settings, told)
    try:
        done = int(find_checkpoint(workdir).name)
    except UserError:
        done = 0
    cut_jsonl(workdir / "metrics.jsonl", done + 1)
    metrics = MetricsWriter(workdir)

    def log(step: int, values: dict[str, float]) -> None:
        metrics.write(step, values)
        print(f"step {step}  " + "  ".join(f"{name} {value:.4g}" for name, value in values.items()), flush=True)

    write_tokenizer(workdir / "tokenizer")
    tokenizer = Tokenizer.load(workdir / "tokenizer")
    rows = sft.make_rows(config, tokenizer, RetrievalService.from_corpus)
    for skill, members in rows.items():
        print(f"{skill}: {len(members)} rows, {sum(len(ids) for ids, _ in members) / 1e6:.2f}M ids", flush=True)
    shape, params = sft.train(config, tokenizer, rows, log, workdir / "checkpoints", str(workdir / "tokenizer"))
    save_hf(params, shape, workdir / "tokenizer", policy)
    metrics.close()
    print(f"{policy}: written")


if __name__ == "__main__":
    launching.run(main)
