#!/usr/bin/env bash
# The recipe h200-300s on one large GPU: 5 minutes of training, about 20 minutes with all stages.
#
#   bash examples/one_gpu.sh OUT web-text/         # .txt, .jsonl or .parquet, 200 MB or more
#   bash examples/one_gpu.sh OUT web-text/ --set train.seed=7               # change the recipe
#
# The held-out documents come from the same text, so scores compare only between runs on equal data.
set -euo pipefail
out=${1:?usage: bash examples/one_gpu.sh OUT TEXT [--set section.key=value ...]}
text=${2:?usage: bash examples/one_gpu.sh OUT TEXT [--set section.key=value ...]}

# Say what this machine has: GPU, attention kernels, versions. Flash Attention 4 is the fastest
# backend (pip install ".[gpu]"); without it training takes fewer steps in the same time.
underpar doctor

# Train a vocabulary of 8,192 with capitals written as operators, and write the tokens of both
# splits. One process per core reads the text.
underpar data build "$text" --out "$out/data" --recipe h200-300s --overwrite "${@:3}"

# Name documents that both splits share, exactly or nearly: they would make the score too good.
underpar data audit "$out/data"

# Train for 294 s of the 300 s and calibrate in the rest. The clock starts after compilation.
underpar train h200-300s --data "$out/data" --out "$out/run" "${@:3}"

# Search the one constant with which rounded weights, tokenizer and code fill 16,000,000 bytes.
underpar pack "$out/run"

# Score the held-out documents with fixed weights, from the packed file alone.
underpar score "$out/run/model.upar" --data "$out/data"

# Score them again with one set of LoRA adapters per document, which learn from what is scored.
underpar score "$out/run/model.upar" --data "$out/data" --adapt

# Check size, scores and codec. Coding is slow, so a sample of the tokens is coded and decoded.
underpar audit "$out/run" --code-tokens 20000

# Write everything about the run into one HTML page.
underpar report "$out/run"
