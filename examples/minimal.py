"""Text in, decoded bytes out: everything underpar does, on one page, on a CPU, without levers.

    text -> tokens              underpar.data
    tokens -> loss -> weights   underpar.model, underpar.train
    weights -> one file         underpar.quant, underpar.artifact
    file -> score, text, bytes  underpar.load

Run it: python examples/minimal.py [--steps 150] [--out FOLDER], under a minute on two cores.
`underpar demo` does the same with levers, checkpoints, calibration, an audit and a report.
"""

import argparse
import math
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F

import underpar
from underpar.artifact.pack import Artifact, pack
from underpar.data.build import BuildOptions, build_data
from underpar.data.folder import DataFolder, load_data
from underpar.data.loader import Loader, MicroBatch
from underpar.data.sources.corpus import demo_corpus
from underpar.model.gpt import GPT
from underpar.model.kv_cache import PackedCache
from underpar.quant.rules import quantize_model
from underpar.recipe import Recipe
from underpar.schema import ModelSpec, QuantPart, TrainPart
from underpar.train import schedule
from underpar.train.optim import Optimizer

# A recipe is data. These are the three parts this page needs; the other parts keep their defaults.
RECIPE = Recipe(
    model=ModelSpec(
        vocab_size=1024,
        num_layers=4,
        dim=128,
        num_heads=2,
        num_kv_heads=1,
        mlp_dim=384,
        context=256,
    ),
    train=TrainPart(matrix_lr=0.02, embed_lr=0.02, clip=1.0),
    # Rules are tried in order; each tensor takes the first rule whose pattern fits its name.
    # "int6:12" is 6 bits per weight, clipped at 12 standard deviations of the row.
    quant=QuantPart(rules=("embedding.weight int7:14", "blocks.*.weight int6:12", "* fp16")),
)
STEP_TOKENS = 1024


def build_tokens(folder: Path) -> DataFolder:
    """Train a tokenizer on the embedded corpus and write the tokens of both splits."""
    # One document in ten is held out, by its hash. The tokenizer never sees held-out text.
    options = BuildOptions(RECIPE.model.vocab_size, holdout=0.1)
    build_data([demo_corpus()], folder, options, overwrite=True)
    return load_data(folder)


def train(data: DataFolder, num_steps: int) -> GPT:
    """Minimize the mean loss of the next token; Muon for matrices, AdamW for the rest."""
    torch.manual_seed(1337)
    model = GPT(RECIPE.model)
    optimizer = Optimizer(model, RECIPE.train)
    # A step is one micro-batch: 1,024 tokens of shuffled documents, end to end in one flat row.
    loader = Loader(data.train, [MicroBatch(STEP_TOKENS, RECIPE.model.context)], seed=1337)
    for step in range(num_steps):
        batch = loader.batch(step, 0)
        # The cache says where documents begin: attention does not look across a boundary.
        logits = model(batch.inputs, PackedCache(batch.segments))  # (N, V)
        loss = F.cross_entropy(logits, batch.targets)
        loss.backward()
        progress = step / num_steps
        optimizer.step(
            schedule.lr_scale(RECIPE.train, progress),
            schedule.momentum(RECIPE.train, progress, step),
        )
        if step % 20 == 0 or step == num_steps - 1:
            print(f"step {step:4}  {loss.item() / math.log(2):.3f} bits per token")
    return model


def pack_model(model: GPT, tokenizer: bytes, path: Path) -> None:
    """Round the weights, entropy-code the integers, write the one file that decoding needs."""
    weights = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    tensors = quantize_model(weights, RECIPE.quant.rules)
    path.write_bytes(pack(Artifact(RECIPE, tokenizer, tensors)))
    num_weights = sum(weight.size for weight in weights.values())
    size = path.stat().st_size
    print(f"packed {num_weights:,} weights and the tokenizer into {size:,} bytes")


def decode_document(data: DataFolder, index: int) -> str:
    """The text of a held-out document, from its tokens."""
    # Every document begins with BOS, which stands for no text.
    return data.tokenizer.decode(data.val.doc(index)[1:]).decode()


def use_file(path: Path, data: DataFolder, num_documents: int) -> float:
    """Score held-out text, continue a prompt, compress a document and get its bytes back."""
    model = underpar.load(path)  # reads nothing but the file
    scores = [model.score(decode_document(data, i)) for i in range(num_documents)]
    # Bits per byte is summed bits over summed bytes, never an average of averages.
    bpb = sum(score.bits for score in scores) / sum(score.num_bytes for score in scores)
    print(f"{num_documents} held-out documents: {bpb:.3f} bits per byte")
    print("written:", repr(model.generate("The government", max_tokens=30)))
    # The codec asks the same predictor for the same probabilities, so the score is the file size.
    raw = decode_document(data, 0).encode()[:300]
    squeezed = model.compress(raw)
    assert model.decompress(squeezed) == raw
    print(f"compressed {len(raw):,} bytes to {len(squeezed):,}, decompressed: equal")
    return bpb


def main(num_steps: int, out: Path) -> float:
    """All stages in order; returns the bits per byte of a few held-out documents."""
    data = build_tokens(out / "data")
    model = train(data, num_steps)
    pack_model(model, data.tokenizer.content, out / "model.upar")
    return use_file(out / "model.upar", data, num_documents=8)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--out", type=Path, help="keep the files here")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        main(arguments.steps, arguments.out or Path(folder))
