"""The artifact: recipe, tokenizer and weights in one file that knows its size."""
