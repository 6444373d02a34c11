"""Words: the tag grammar, answers, the tokenizer and the prompts. Nothing here knows a model."""
