"""Text: the tag grammar, answers, the tokenizer and the prompts. Nothing here depends on a model."""
