"""Exports a checkpoint to a Hugging Face directory: `python launch/export_hf.py --checkpoint=DIR --out=DIR`.

LoRA adapters are merged into the weights; --adapters_only writes only the adapters, in PEFT's format.
"""

from absl import flags

from psearch_jax.runtime import cli

CHECKPOINT = flags.DEFINE_string("checkpoint", None, "A run directory, or one step of its checkpoints.")
BEST = flags.DEFINE_bool("best", False, "Export the run's best checkpoint by validation instead of its newest.")
OUT = flags.DEFINE_string("out", None, "The directory to create; it must not exist.")
ADAPTERS = flags.DEFINE_bool("adapters_only", False, "Write only the run's LoRA adapters, in PEFT's format.")
DTYPE = flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16", "float16"], "Dtype of the written weights.")
cli.require("checkpoint", "out")


def main(_: list[str]) -> None:
    import jax
    import jax.numpy as jnp

    from psearch_jax.config import Config, Lora, with_method
    from psearch_jax.models.hf import save_hf
    from psearch_jax.models.peft import save_adapters
    from psearch_jax.runtime.paths import check_new, locate
    from psearch_jax.text.tokenizer import Tokenizer
    from psearch_jax.train.checkpointing.best import find_best
    from psearch_jax.train.checkpointing.checkpoint import load_params
    from psearch_jax.train.checkpointing.run_config import (
        load_run_config,
        locate_tokenizer,
        make_export_files,
        make_export_shape,
    )
    from psearch_jax.types import UserError

    jax.config.update("jax_platforms", "cpu")  # a large model may not fit one accelerator, and none is needed
    cli.configure_jax()
    dtype = jnp.dtype(DTYPE.value)
    check_new(locate(OUT.value))  # before the weights are loaded
    checkpoint = find_best(CHECKPOINT.value) if BEST.value else CHECKPOINT.value
    config, params, loop = load_params(checkpoint, dtype=dtype, with_base=not ADAPTERS.value)
    record = loop.get("lora")
    lora = Lora(record["rank"], record["alpha"]) if record else None
    if ADAPTERS.value:
        if lora is None:
            raise UserError(f"--adapters_only: no adapters in {CHECKPOINT.value}, accepted: a run with lora_rank")
        save_adapters(params, config, lora, record["name"] or record["path"], OUT.value, dtype)
        print(f"{CHECKPOINT.value}, step {loop['step']} -> {OUT.value} (adapters of rank {lora.rank}, {DTYPE.value})")
        return
    trained = load_run_config(str(checkpoint))
    files = make_export_files(trained) if trained else {}
    directory = locate_tokenizer(with_method(trained or Config()), loop["tokenizer"])
    tokenizer = Tokenizer.load(directory, config.eos_ids)
    shape = make_export_shape(config, tokenizer)
    lost = save_hf(params, shape, tokenizer.directory, OUT.value, dtype, lora=lora, files=files)
    why = f", the best by {loop['best']['metric']} ({loop['best']['value']:.4f})" if "best" in loop else ""
    print(f"{CHECKPOINT.value}, step {loop['step']}{why} -> {OUT.value} ({DTYPE.value})")
    if lora:
        print(f"rounding to {DTYPE.value} changes what the adapters add by {lost:.2g} (relative error)")


if __name__ == "__main__":
    cli.run(main)
