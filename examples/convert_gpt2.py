"""Convert a GPT-2 to a TokenFormer, check that it predicts the same, then grow it.

python examples/convert_gpt2.py              # a small GPT-2 with random weights, no download
python examples/convert_gpt2.py gpt2         # the published one, from the hub or a folder
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

import tokenformer


def small_gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    sizes = {"vocab_size": 257, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=256, eos_token_id=256))


def text_batches(source: GPT2LMHeadModel, name: str | None) -> list[torch.Tensor]:
    """A little text to measure the conversion on: this file, in the model's own tokens."""
    text = Path(__file__).read_text(encoding="utf-8")
    ids = AutoTokenizer.from_pretrained(name)(text)["input_ids"] if name else [*text.encode()]
    length = min(64, source.config.n_positions)
    rows = [ids[i : i + length] for i in range(0, len(ids) - length, length)]
    return [torch.tensor(rows)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", nargs="?", help="a GPT-2 on the hub or in a folder")
    name = parser.parse_args().model

    source = (GPT2LMHeadModel.from_pretrained(name) if name else small_gpt2()).eval()
    batches = text_batches(source, name)
    model, report = tokenformer.from_transformer(source, batches)
    print(report)

    ids = batches[0][:, :32]
    with torch.no_grad():
        change = (model(ids).logits - source(ids).logits).abs().max()
    print(f"{source.num_parameters():,} -> {model.num_parameters():,} parameters")
    print(f"largest difference of a logit: {change:.1e}")

    config = model.config
    grown, report = tokenformer.grow(model, ffn_tokens=2 * config.tokens("ffn", layer=0))
    print(f"grown to {grown.num_parameters():,}; logits moved by {report.max_output_change:.1e}")


if __name__ == "__main__":
    main()
