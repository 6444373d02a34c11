"""Makes the toy policy: `python launch/sft.py --config=configs/toy_sft.py --workdir=DIR`.

DIR/policy is the result, in Hugging Face format; DIR/config.json holds the settings, DIR/metrics.jsonl the loss.
"""

import dataclasses
import json
import tempfile

from absl import flags
from ml_collections import config_flags

from psearch_jax import launching

CONFIG = config_flags.DEFINE_config_file("config", None, "The cold start: a file like configs/toy_sft.py.")
WORKDIR = flags.DEFINE_string("workdir", None, "The directory to write to; made if absent.")
flags.mark_flags_as_required(["config", "workdir"])


def main(_: list[str]) -> None:
    from psearch_jax.config import from_mapping
    from psearch_jax.data.closed_world import ClosedWorld, train_tokenizer
    from psearch_jax.metrics import MetricsWriter
    from psearch_jax.models.hf import save_hf
    from psearch_jax.paths import locate, make_writable, write_whole
    from psearch_jax.text.tokenizer import Tokenizer
    from psearch_jax.train import sft
    from psearch_jax.types import UserError
    from retrieval.service import RetrievalService

    config = from_mapping(CONFIG.value.to_dict(), sft.SFTConfig)
    workdir = locate(WORKDIR.value)
    policy = workdir / "policy"
    if policy.exists():
        raise UserError(f"{policy}: exists already, accepted: a --workdir without a policy")
    launching.configure_jax()
    make_writable(workdir)
    write_whole(workdir / "config.json", json.dumps(dataclasses.asdict(config), indent=2) + "\n")
    metrics = MetricsWriter(workdir)

    def log(step: int, values: dict[str, float]) -> None:
        metrics.write(step, values)
        print(f"step {step}  " + "  ".join(f"{name} {value:.5g}" for name, value in values.items()), flush=True)

    with tempfile.TemporaryDirectory() as directory:
        train_tokenizer(ClosedWorld.make(0), directory)
        tokenizer = Tokenizer.load(directory)
        stages = sft.make_rows(config, tokenizer, RetrievalService.from_corpus)
        for rows in stages:
            print(f"{len(rows)} trajectories, {sum(len(ids) for ids, _ in rows) / 1e6:.2f}M ids", flush=True)
        shape, params = sft.train(config, tokenizer, stages, log)
        save_hf(params, shape, directory, policy)
    metrics.close()
    print(f"{policy}: written")


if __name__ == "__main__":
    launching.run(main)
