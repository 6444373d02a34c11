"""A tool of your own: a function that the policy can call.

    python launch/train.py --config=configs/qwen0p5b_cpu.py --config.model.path=MODEL \\
        --config.rollout.dialect=tool_calls --config.data.template=tool_calls \\
        --config.rollout.tools=examples/custom_tool.py:count_words --config.data.source=data/questions.jsonl \\
        --config.retrieval.corpus=data/corpus.jsonl --workdir=runs/words

The policy sees the name, the type hints and the docstring. What the function returns is its result as text; the policy
gets an exception as one line. For calls that are faster in a batch, make a `psearch_jax.rollout.tools.Tool`.
"""


def count_words(text: str, word: str) -> int:
    """Counts how often a word occurs in a text.

    Args:
        text: The text.
        word: The word, in any case.
    """
    return text.lower().split().count(word.lower())
