"""The recipe of the toy policies that ship with the package: tokenizer, exercises, scripts, cold start."""
