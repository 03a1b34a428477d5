"""What a general compressor needs for the held-out text, to compare a score with."""

import lzma

from underpar.data.shards import Shard
from underpar.data.tokens.tokenizer import Tokenizer


def xz_bytes(shard: Shard, tokenizer: Tokenizer) -> int:
    """Bytes of `xz -9` over all documents in one file."""
    text = b"".join(tokenizer.decode(shard.doc(i)) for i in range(shard.num_documents))
    return len(lzma.compress(text, preset=9))
