#!/usr/bin/env bash
# From text to a decoded file on a laptop: about 10 minutes on two cores, no GPU.
#
#   bash examples/laptop.sh                        # the corpus that comes with the package
#   bash examples/laptop.sh OUT my-texts/          # your own .txt, .jsonl or .parquet files
#   bash examples/laptop.sh OUT my-texts/ --set train.budget_seconds=60     # change the recipe
#
# Every command can be stopped and started again. Each one has --help.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=${1:-laptop}
text=${2:-$here/../src/underpar/data/demo/demo.jsonl.xz}

# Train a tokenizer on the training documents and write the tokens of both splits. One document in
# ten is held out, by its hash. --overwrite: a second start replaces the data folder of the first.
underpar data build "$text" --out "$out/data" --recipe demo --overwrite "${@:3}"

# Say what was built: documents, tokens, bytes per token, and what the reader changed.
underpar data inspect "$out/data"

# Train the recipe `demo` for 5 minutes of wall clock, then measure what rounding will cost.
underpar train demo --data "$out/data" --out "$out/run" --set train.budget_seconds=300 "${@:3}"

# Round the weights so that model, tokenizer and code fill the byte cap; write run/model.upar.
underpar pack "$out/run"

# Score the held-out documents, in bits per byte, with fixed weights.
underpar score "$out/run/model.upar" --data "$out/data"

# Score them again with weights that learn from each chunk of a document after its score is final.
underpar score "$out/run/model.upar" --data "$out/data" --adapt

# Check size, scores and codec: this encodes and decodes held-out documents for real.
underpar audit "$out/run" --code-tokens 20000

# Write everything about the run into one HTML page.
underpar report "$out/run"

# Compress a file with the model and get the same bytes back.
underpar compress "$out/run/model.upar" "$here/laptop.sh" "$out/laptop.upz"
underpar decompress "$out/run/model.upar" "$out/laptop.upz" "$out/laptop.back"
cmp "$here/laptop.sh" "$out/laptop.back"
