"""Text to tokens, exactly: documents, tokenizer, shards, batches."""
