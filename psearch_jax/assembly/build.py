"""Builds the objects of a run from its config; the module that connects all the others."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from psearch_jax.assembly.checks import check_run, check_vocabulary, missing_inputs, needs_retriever
from psearch_jax.assembly.policies import (
    describe_policy,
    init_adapters,
    load_teacher,
    load_tokenizer,
    load_weights,
    with_adapter_shape,
)
from psearch_jax.assembly.programs import make_sampler
from psearch_jax.assembly.questions import load_questions, make_world
from psearch_jax.assembly.tools import describe_dialect, describe_tools, make_dialect, make_tools
from psearch_jax.closed_world.encyclopedia import ClosedWorld
from psearch_jax.config import Config, DecoderConfig, LearningSection, Method, with_method
from psearch_jax.data.loader import QuestionLoader
from psearch_jax.data.transcripts import read_trajectories
from psearch_jax.eval.evaluate import questions_digest
from psearch_jax.limits import validate
from psearch_jax.models import lora
from psearch_jax.rl.compat import TranscriptParser, check_examples
from psearch_jax.rl.own_terms import load_terms
from psearch_jax.rl.rewards import Reward, Term
from psearch_jax.rollout.boundary import build_tables
from psearch_jax.rollout.collect import Collector
from psearch_jax.rollout.copy import SamplingCopy
from psearch_jax.rollout.sampler_programs import SamplingWeights
from psearch_jax.runtime import progress
from psearch_jax.runtime.cli import read_token
from psearch_jax.runtime.own_code import call_object, load_object
from psearch_jax.sharding import (
    STORAGE,
    attach_shardings,
    describe_meshes,
    make_meshes,
    param_shardings,
)
from psearch_jax.text.dialects import Dialect
from psearch_jax.text.prompts import load_template, render_messages, render_prompt
from psearch_jax.text.tokenizer import Tokenizer
from psearch_jax.train.checkpointing import checkpoint, settings
from psearch_jax.train.checkpointing.run_config import has_checkpoints, locate_tokenizer
from psearch_jax.train.critic import build_critic, critic_learning, init_critic, without_lm_head
from psearch_jax.train.learner import Learner
from psearch_jax.train.replay import Recording
from psearch_jax.train.run import Run
from psearch_jax.train.state import (
    TrainState,
    abstract_state,
    init_state,
    make_optimizer,
    policy_updates,
    reads_own_logprobs,
    state_shardings,
    updates_per_step,
)
from psearch_jax.types import Question, UserError, format_items
from retrieval.protocol import Retriever

log = logging.getLogger("psearch_jax")
SERVICE = "config.retrieval.service"
# The settings of the ratio of policy to old policy, with their defaults.
OF_RATIO = {name: getattr(LearningSection(), name) for name in ("ratio", "clip_low", "clip_high")}


@dataclass(frozen=True)
class Engine:
    """The objects that answer questions, shared by training, evaluation and serving."""

    config: Config
    model: DecoderConfig
    tokenizer: Tokenizer
    path: str  # the directory of the weights; empty when they are random or come from a checkpoint
    mesh: Mesh  # of `params`
    # Storage-sharded. In training: float32 weights or, with adapters, only their base in the sampling dtype.
    # Otherwise: weights in the sampling dtype, and any adapters.
    params: nnx.State
    collector: Collector
    world: ClosedWorld | None  # when data.source is closed_world

    def sampling_copy(self) -> nnx.State:
        """The parameters in the sampler's dtype and sharding; arrays that already have both are not copied."""
        m, parts = self.config.model, lora.split_adapters(self.params)
        return SamplingCopy(*parts, jnp.dtype(m.sampling_dtype), self.mesh, trained=False)(*parts)

    def sampling_weights(self) -> SamplingWeights:
        """The policy as the sampler reads it."""
        return self.collector.sampler.weights(self.sampling_copy())

    def describe_code(self) -> dict[str, tuple[str, str]]:
        """For each config field that may name a user's code for rollouts, what it names and a fingerprint of that."""
        service = self.config.retrieval.service
        return {
            "retrieval.service": (service, load_object(service, SERVICE)[1] if service else ""),
            "rollout.dialect": describe_dialect(self.config.rollout),
            "rollout.tools": describe_tools(self.config.rollout, self.collector.tools),
        }

    def describe(self) -> str:
        """One line that describes the model and the devices."""
        count = sum(x.size for x in jax.tree.leaves(self.params))
        mesh = describe_meshes(self.mesh.shape, self.collector.sampler.mesh.shape)
        return f"{count / 1e6:.1f}M parameters on {self.mesh.devices.size} x {jax.devices()[0].device_kind} ({mesh})"


def by_method(parts: Engine, config: Config, method: Method) -> Collector:
    """A collector for another method, with the same model and, if the method searches, the same retriever.

    Args:
      config: the config that `parts` was built from. `parts.config` also has the changes of the first method.
    """
    model = replace(parts.config.model, path="", tokenizer=parts.tokenizer.directory)
    config = replace(config, method=method, model=model)
    return engine(config, params=parts.params, model=parts.model, retriever=parts.collector.retriever).collector


def engine(
    config: Config,
    training: bool = False,
    params: nnx.State | None = None,
    model: DecoderConfig | None = None,
    retriever: Retriever | None = None,
) -> Engine:
    """Builds the objects that collect rollouts.

    Args:
      training: also require the inputs that only training needs.
      params: weights, with or without adapters; default: those that the config names.
      model: the shape of `params`.
      retriever: default: the one that the config names.

    Raises:
      UserError: inputs are missing (one message lists them all), or do not match each other.
    """
    config = with_method(config)
    validate(config, training)
    if missing := missing_inputs(config, training, retriever):
        raise UserError(format_items("this run needs:", missing))
    if params is None:
        config = with_adapter_shape(config)
    mesh, rollout_mesh = make_meshes(config.mesh)
    if not training:
        mesh = rollout_mesh
    dtype = jnp.float32 if training and not config.model.lora_rank else jnp.dtype(config.model.sampling_dtype)
    loaded = params is None
    model, params, path = load_weights(config, mesh, model, params, dtype)
    if config.model.adapters and loaded and not training:
        params = lora.join_adapters(params, init_adapters(config, model, mesh))
    if not training and lora.split_adapters(params)[1] is None:  # the config may ask for adapters that are not loaded
        config = replace(config, model=replace(config.model, lora_rank=0))
    check_run(config, model, mesh if training else None, rollout_mesh, jax.process_count())
    with progress.step("loading the tokenizer"):
        tokenizer = load_tokenizer(config, model, path)
    tools = make_tools(config.rollout)
    dialect = make_dialect(config, tokenizer, tools)
    tables = build_tables(tokenizer.token_bytes, model.vocab_rows, dialect.stops)
    sampler = make_sampler(config, model, rollout_mesh, tables, tokenizer.size, sorted(tokenizer.stop_ids))
    world, render = make_world(config), make_renderer(config, dialect)
    if retriever is None and needs_retriever(config, training):
        with progress.step("opening the passages"):
            retriever = make_retriever(config, world)
    collector = Collector.of(
        sampler, tokenizer, retriever, render, config.rollout, config.retrieval, dialect=dialect, tools=tools
    )
    return Engine(config, model, tokenizer, path, mesh, params, collector, world)


def training_run(config: Config) -> Run:
    """Builds everything that train/trainer.py needs."""
    check_template(with_method(config))  # before loading weights, which may take minutes
    terms = load_terms(with_method(config))
    parts = engine(config, training=True)
    user_config, config = config, parts.config
    log.info(parts.describe())
    learning, adapters, mesh = config.learning, config.model.lora, parts.mesh
    if config.train.staleness and not learning.importance_cap and learning.old_logprobs != "sampler":
        log.warning("rollouts are sampled with older weights without a correction: set learning.importance_cap=2")
    without_effect = [f"{k}={getattr(learning, k)}" for k in OF_RATIO if getattr(learning, k) != OF_RATIO[k]]
    if without_effect and reads_own_logprobs(config):
        log.warning("%s: no effect with one update per step, where the ratio is 1", ", ".join(without_effect))
    recording = Recording(config.train.replay) if config.train.replay else None
    questions, evaluation = load_questions(config, parts.world)
    try:
        check_vocabulary(parts.tokenizer, questions)
    except UserError as error:
        log.warning("%s", error)
    evaluation, scripted = [] if recording else evaluation, {}
    if config.train.scripted and not recording:  # a recording has them
        file, render, dialect = config.train.scripted, parts.collector.render, parts.collector.dialect
        scripted = read_trajectories(file, questions, render, dialect, config.rollout)
        log.info("%d training questions have a scripted transcript", len(scripted))
    optimizer, base = make_optimizer(learning, policy_updates(config)), parts.params if adapters else None
    rollout_mesh, n_ids = parts.collector.sampler.mesh, parts.tokenizer.size
    teacher, reference, teacher_path = None, None, ""
    if learning.teacher:
        teacher, reference, teacher_path = load_teacher(config, mesh, parts.tokenizer)
        try:
            check_run(config, teacher, mesh, None, jax.process_count())
        except UserError as error:
            raise UserError(f"config.learning.teacher={learning.teacher}: {error}") from None
    learner = Learner(
        config, parts.model, optimizer, mesh, n_ids, base=base, rollout_mesh=rollout_mesh, teacher=teacher
    )
    trained = init_adapters(config, parts.model, mesh) if adapters else parts.params
    if learning.kl_coefficient > 0 and reference is None:
        reference = trained if config.model.adapters else learner.reference_copy(parts.params)
    abstract, critic, critic_start = abstract_state(trained, optimizer), None, None
    if learning.algorithm == "ppo":
        critic_optimizer = make_optimizer(critic_learning(config), updates_per_step(config) * config.train.steps)
        headless = without_lm_head(parts.params) if adapters else None
        critic = build_critic(config, parts.model, critic_optimizer, mesh, headless)
        critic_start = init_critic(parts.params, parts.model, adapters, config.seed, mesh), critic_optimizer
        abstract = replace(abstract, critic=abstract_state(*critic_start))

    def initial_state() -> TrainState:
        state = init_state(trained, optimizer, mesh)
        return replace(state, critic=init_state(*critic_start, mesh)) if critic_start else state

    loader = QuestionLoader(
        questions,
        config.train.prompts // jax.process_count(),
        config.seed,
        process_index=jax.process_index(),
        process_count=jax.process_count(),
    )
    contents = _describe_inputs(config, parts, loader.fingerprint, evaluation, teacher_path, terms)
    return Run(
        config=config,
        collector=parts.collector,
        learner=learner,
        loader=loader,
        evaluation=evaluation,
        reward=make_reward(config, parts.tokenizer, terms),
        stream=parts.collector.stream(config.rollout.samples, config.seed),
        abstract=attach_shardings(abstract, state_shardings(abstract, mesh)),
        initial_state=initial_state,
        model=parts.model,
        tokenizer_path=parts.tokenizer.directory,
        user_config=user_config,
        reference=reference,
        scripted=scripted,
        critic=critic,
        recording=recording,
        lora=checkpoint.lora_record(config.model, config.seed, parts.path),
        settings=settings.record(config, contents, unused=("sft",)),
    )


def _describe_inputs(
    config: Config, parts: Engine, questions: str, evaluation: Sequence[Question], teacher: str, terms: Sequence[Term]
) -> dict[str, tuple[str, str]]:
    """For each field with `Resume.SAME_CONTENT`, the path it names and a fingerprint of the content."""
    data, index, corpus = config.data, config.retrieval.index, config.retrieval.corpus
    scripted = config.train.scripted
    template = "" if data.prompts_in_rows else load_template(data.template)
    described = describe_policy(config.model, parts.path, parts.tokenizer) | parts.describe_code()
    return described | {
        "data.source": (data.source, questions),
        "data.validation": (data.validation, questions_digest(evaluation) if data.validation else ""),
        "data.template": (data.template, settings.hash_texts(template)),
        "retrieval.index": (index, settings.hash_files(index, ("**/manifest.json",)) if index else ""),
        "retrieval.corpus": (corpus, settings.hash_files(corpus) if corpus else ""),
        "train.scripted": (scripted, settings.hash_files(scripted) if scripted and not config.train.replay else ""),
        "reward.terms": (config.reward.terms, settings.hash_texts(*(term.identity for term in terms))),
        "learning.teacher": (teacher, settings.hash_files(teacher, settings.WEIGHTS) if teacher else ""),
    }


def from_path(config: Config, path: str) -> Engine:
    """An engine for a Hugging Face directory, a hub id, `toy`, a run directory, or one checkpoint of a run."""
    if not has_checkpoints(path):
        return engine(replace(config, model=replace(config.model, path=path)))
    _, mesh = make_meshes(config.mesh)
    model, params, loop = checkpoint.load_params(
        path, lambda abstract: param_shardings(abstract, STORAGE, mesh), jnp.dtype(config.model.sampling_dtype)
    )
    section = {"path": "", "adapters": "", "tokenizer": locate_tokenizer(config, loop["tokenizer"])}
    if loop.get("lora"):
        section |= {"lora_rank": loop["lora"]["rank"], "lora_alpha": loop["lora"]["alpha"]}
    return engine(replace(config, model=replace(config.model, **section)), params=params, model=model)


def make_retriever(config: Config, world: ClosedWorld | None, retry_deadline_s: float | None = None) -> Retriever:
    """The retriever that the config names, or else one over the world's passages.

    Args:
      retry_deadline_s: seconds to retry failing servers; default: the config's.
    """
    section = config.retrieval
    retry_deadline_s = section.retry_deadline_s if retry_deadline_s is None else retry_deadline_s
    if section.service:
        made = call_object(section.service, SERVICE, section)
        if not (hasattr(made, "search") and hasattr(made, "describe")):
            raise UserError(f"{SERVICE}={section.service}: accepted: an object with the methods search and describe")
        return made
    if section.url:
        from retrieval.remote.client import HttpRetriever

        token = read_token(section.token_file, "config.retrieval.token_file") if section.token_file else None
        return HttpRetriever(section.url, section.timeout_s, retry_deadline_s, token)
    from retrieval.service import RetrievalService  # loads ScaNN

    if section.index:
        return RetrievalService.open(section.index)
    if section.corpus:
        return RetrievalService.from_corpus(section.corpus)
    assert world is not None  # missing_inputs has checked it
    return RetrievalService.from_corpus(world.passages)


def make_renderer(config: Config, dialect: Dialect) -> Callable[[Question], list[int]]:
    """The function from a question to the token ids of its prompt."""
    if config.data.prompts_in_rows:
        if config.method in ("search_r1", "r1"):  # such as the published file's, which ask for several sub-queries
            log.warning(
                "config.method=%s with data.template=row: the prompts of the rows are used as they are", config.method
            )

        def render(question: Question) -> list[int]:
            if "prompt" not in question.metadata:
                raise UserError(
                    f"question {question.id}: no prompt found in its row, needed with config.data.template=row"
                )
            return render_messages(dialect, question.metadata["prompt"])

        return render
    template = load_template(config.data.template)
    return lambda question: render_prompt(dialect, template, question.text)


def check_template(config: Config) -> None:
    """Refuses a prompt template that the compat reward cannot parse; prompts of data rows are checked when scored."""
    if config.reward.profile == "compat" and not config.data.prompts_in_rows:
        name = config.data.template
        check_examples(load_template(name), config.reward, f"config.data.template={name}")


def make_reward(config: Config, tokenizer: Tokenizer, terms: Sequence[Term]) -> Reward:
    """The reward that `config.reward.profile` names, with the terms of `load_terms`."""
    section = config.reward
    if section.profile == "paper":
        return Reward(section, further=terms)
    return Reward(section, TranscriptParser(tokenizer, config.data.prompts_in_rows), terms)
