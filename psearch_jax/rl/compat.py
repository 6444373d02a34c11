"""The reward of the public PyTorch implementation on rendered transcripts, including its quirks.

It parses prompt and response as one text and assumes that the prompt shows two example searches and one example
answer. Use it to reproduce published numbers; `rl.rewards.paper_reward` is the rule without the quirks.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from psearch_jax.config import FAMILIES, RewardSection
from psearch_jax.rl.rewards import count_part, decomposition_part, format_part, with_shared_parts
from psearch_jax.text.answers import exact_match
from psearch_jax.text.tags import SEARCH_OPEN, SEPARATOR, TAG
from psearch_jax.text.tokenizer import Tokenizer
from psearch_jax.types import Kind, RewardParts, Trajectory, UserError

PROMPT_SEARCHES = 2  # assumed number of searches in the prompt's own examples
_CHATS = {chat for family in FAMILIES.values() for chat in family.chats}
_ASSISTANT = re.compile(rf"(?:{'|'.join(re.escape(chat.assistant) for chat in _CHATS)})\s*")
_SEARCH = re.compile(r"<search>(.*?)</search>", re.DOTALL)
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def _block(name: str) -> str:
    return rf"\s*<{name}>(?:(?!{TAG.pattern}).)*</{name}>"


_THINK = _block("think")
_VALID = re.compile(rf"{_THINK}(?:{_block('search')}{_block('information')}{_THINK})*{_block('answer')}\s*", re.DOTALL)


def compat_score(prompt: str, response: str, golds: tuple[str, ...], kind: Kind, reward: RewardSection) -> RewardParts:
    """The four parts of the public score.

    Its quirks:
      The answer is the last of at least two answer pairs in prompt + response. If the response has none and the
      prompt has two, the prompt's example is graded.
      A valid grammar is rewarded whatever the answer.
      The question counts as decomposed if the third search pair, counted from the prompt on, contains `##`.
      The number of searches is the count of opening tags minus 2, whether or not they were executed.
    """
    text = prompt + response
    answers = _ANSWER.findall(text)
    answer = answers[-1].strip() if len(answers) >= 2 else None
    right = exact_match(answer, golds)
    searches = _SEARCH.findall(text)
    decomposed = len(searches) > PROMPT_SEARCHES and SEPARATOR in searches[PROMPT_SEARCHES]
    return RewardParts(
        outcome=float(right),
        format=format_part(right, answer is not None, valid_transcript(text), reward),
        decomposition=decomposition_part(kind, decomposed, reward.decomposition),
        search_count=count_part(kind, text.count(SEARCH_OPEN) - PROMPT_SEARCHES, reward.search_count),
    )


class CompatReward:
    """`compat_score` of rollouts.

    The prompt is read with control tokens as text, because the grammar starts after the assistant marker; the reply,
    which is sampled text and observations, without them, because nothing may follow the answer.

    Args:
      section: the weight of each part.
      check_prompts: check the prompt of every rollout by `check_examples`, where prompts differ between questions.
    """

    def __init__(self, section: RewardSection, tokenizer: Tokenizer, check_prompts: bool):
        self._section, self._tokenizer, self._check_prompts = section, tokenizer, check_prompts

    def __call__(self, trajectories: Sequence[Trajectory]) -> list[RewardParts]:
        parts = [self._score(t) for t in trajectories]
        return with_shared_parts(parts, trajectories, self._section)

    def _score(self, trajectory: Trajectory) -> RewardParts:
        question, ids, start = trajectory.question, trajectory.ids, trajectory.prompt_length
        prompt = self._tokenizer.decode(ids[:start], control=True)
        if self._check_prompts:
            check_examples(prompt, self._section, f"the prompt of question {question.source} {question.id}")
        response = self._tokenizer.decode(ids[start:])
        return compat_score(prompt, response, question.answers, question.kind, self._section)


def check_examples(prompt: str, reward: RewardSection, name: str) -> None:
    """Refuses a prompt whose examples are not those that `compat_score` assumes.

    Args:
      prompt: the text of a prompt or a template.
      reward: searches are checked only if decomposition or their number is rewarded.
      name: name of the prompt, for the message.

    Raises:
      UserError: a correct answer, or the correct number of searches, would not be rewarded under this prompt.
    """
    answers, searches = len(_ANSWER.findall(prompt)), len(_SEARCH.findall(prompt))
    counted = reward.decomposition != 0 or reward.search_count != 0
    mismatch = counted and (searches != PROMPT_SEARCHES or prompt.count(SEARCH_OPEN) != PROMPT_SEARCHES)
    if mismatch or not answers:
        required = f"exactly {PROMPT_SEARCHES} times <search> .. </search> and " if counted else ""
        raise UserError(
            f"{name}: found {prompt.count(SEARCH_OPEN)} times <search> (closed: {searches}) and {answers} times "
            f"<answer> .. </answer>; accepted with config.reward.profile=compat, which counts the prompt's own "
            f"examples: {required}at least one <answer> .. </answer>; or profile=paper"
        )


def valid_transcript(text: str) -> bool:
    """Whether the text after the first assistant marker is think, (search, information, think)*, answer.

    Only whitespace may separate the blocks, nothing may follow the answer, and no block may contain a tag.
    """
    marker = _ASSISTANT.search(text)
    return marker is not None and _VALID.fullmatch(text, marker.end()) is not None
