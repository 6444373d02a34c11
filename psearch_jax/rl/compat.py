"""The reward of the public PyTorch implementation on rendered transcripts, including its quirks.

It parses prompt and response as one text and assumes that the prompt shows two example searches and one example
answer. Use it to reproduce published numbers; `rl.rewards.parse_actions` is without the quirks.
"""

from __future__ import annotations

import re

from psearch_jax.config import FAMILIES, RewardSection
from psearch_jax.rl.rewards import Parsed
from psearch_jax.text.answers import exact_match
from psearch_jax.text.tags import SEARCH_OPEN, SEPARATOR, TAG
from psearch_jax.text.tokenizer import Tokenizer
from psearch_jax.types import Trajectory, UserError

PROMPT_SEARCHES = 2  # assumed number of searches in the prompt's own examples
_CHATS = {chat for family in FAMILIES.values() for chat in family.chats}
_ASSISTANT = re.compile(rf"(?:{'|'.join(re.escape(chat.assistant) for chat in _CHATS)})\s*")
_SEARCH = re.compile(r"<search>(.*?)</search>", re.DOTALL)
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def _block(name: str) -> str:
    return rf"\s*<{name}>(?:(?!{TAG.pattern}).)*</{name}>"


_THINK = _block("think")
_VALID = re.compile(rf"{_THINK}(?:{_block('search')}{_block('information')}{_THINK})*{_block('answer')}\s*", re.DOTALL)


def parse_transcript(prompt: str, response: str, trajectory: Trajectory) -> Parsed:
    """A rollout as the public score parses its prompt and response; only the question is read of `trajectory`.

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
    searches = _SEARCH.findall(text)
    decomposed = len(searches) > PROMPT_SEARCHES and SEPARATOR in searches[PROMPT_SEARCHES]
    return Parsed(
        trajectory,
        worth=float(exact_match(answer, trajectory.question.answers)),
        answered=answer is not None,
        well_formed=valid_transcript(text),
        decomposed=decomposed,
        searches=text.count(SEARCH_OPEN) - PROMPT_SEARCHES,
    )


class TranscriptParser:
    """`parse_transcript` of rollouts.

    The prompt is read with control tokens as text, because the grammar starts after the assistant marker; the reply,
    which is sampled text and observations, without them, because nothing may follow the answer.

    Args:
      check_prompts: check the prompt of every rollout by `check_examples`, where prompts differ between questions.
    """

    def __init__(self, tokenizer: Tokenizer, check_prompts: bool):
        self._tokenizer, self._check_prompts = tokenizer, check_prompts

    def __call__(self, trajectory: Trajectory, reward: RewardSection) -> Parsed:
        question, ids, start = trajectory.question, trajectory.ids, trajectory.prompt_length
        prompt = self._tokenizer.decode(ids[:start], control=True)
        if self._check_prompts:
            check_examples(prompt, reward, f"the prompt of question {question.source} {question.id}")
        return parse_transcript(prompt, self._tokenizer.decode(ids[start:]), trajectory)


def check_examples(prompt: str, reward: RewardSection, name: str) -> None:
    """Refuses a prompt whose examples are not those that `parse_transcript` assumes.

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
