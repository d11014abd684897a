"""Decoding and time to the first token against llama.cpp, at equal bytes per weight.

    python -m benchmarks.llama_cpp --python ENVIRONMENT/bin/python
    python -m benchmarks.llama_cpp --python ENVIRONMENT/bin/python --contexts 128 --formats int8

llama-cpp-python and gguf may be in an environment of their own (`pip install llama-cpp-python
gguf`): its interpreter runs a Llama with random weights, of the same width, depth and vocabulary,
whose feed-forward size gives as many weights to read per token as our model has. Both decode
greedily with batch size 1 and take turns within a round. llama.cpp has its default settings, among
them a KV cache in F16; ours has the dtype of the activations. The limit is reading the weights and
the KV cache once per token.
"""

import json
import statistics
import subprocess
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.decode import BITS, SIZES, Decoder
from benchmarks.harness import (
    make_parser,
    number,
    progress,
    ratio,
    run,
    seconds_of,
    with_spread,
)
from benchmarks.results import Row
from benchmarks.training import ours

FORMATS = {"fp32": "F32", "bf16": "F16", "int8": "Q8_0", "int4": "Q4_0"}
"""Ours, and the one of llama.cpp with as many bytes per weight."""
BLOCK = 32
"""Weights per block of Q8_0 and Q4_0: rows are whole blocks."""
WORKER = Path(__file__).parent / "llama_cpp_worker.py"

COLUMNS = {
    "time / llama.cpp": with_spread("times_llama"),
    "ms/token": number("seconds", ".1f", unit=1e-3),
    "share of read bandwidth": with_spread("share"),
    "first token / llama.cpp": with_spread("first_times_llama"),
    "first token, ms": number("first_seconds", ".0f", unit=1e-3),
    "bandwidth, GB/s": number("limit_gbytes", ".0f"),
}


def feed_forward_size(parameters: int, width: int, layers: int, vocab: int) -> int:
    """Return the feed-forward size, in whole blocks, that gives a Llama with a tied output head
    about this many parameters."""
    others = llama_parameters(0, width, layers, vocab)
    blocks = round((parameters - others) / (3 * width * layers * BLOCK))
    if blocks < 1:
        raise ValueError(f"{parameters:,} parameters are too few: a Llama has {others:,} others")
    return BLOCK * blocks


def llama_parameters(hidden: int, width: int, layers: int, vocab: int) -> int:
    """Return the parameters of a Llama: embedding, attention, gated MLP and norms."""
    return vocab * width + layers * (4 * width**2 + 3 * width * hidden + 2 * width) + width


class LlamaCpp:
    """A process of another interpreter with llama.cpp, which measures on request."""

    def __init__(self, folder: Path, formats: list[str], shape: Row, options: Namespace) -> None:
        setup = {"folder": str(folder), "formats": formats, "shape": shape}
        setup |= {"tokens": options.tokens, "threads": options.threads}
        self.process = subprocess.Popen(
            [options.python, "-c", WORKER.read_text(), json.dumps(setup)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=folder,
        )
        ready = self.answer()
        self.version: str = ready["version"]
        self.bytes: dict[str, int] = ready["bytes"]
        """Bytes of the weights by format."""

    def __enter__(self) -> "LlamaCpp":
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()

    def measure(self, format_name: str, context: int) -> Row:
        """Return the seconds to the first token and the median of the others."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([format_name, context]) + "\n")
        self.process.stdin.flush()
        return self.answer()

    def answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"the llama.cpp process ended with {self.process.wait()}; see above")
        return json.loads(line)


class OurModels:
    """Our model in each of the formats that this version supports."""

    def __init__(self, folder: Path, formats: list[str], options: Namespace) -> None:
        from tokenformer import TokenformerForCausalLM
        from tokenformer.models.quantization import TokenQuantization

        self.tokens = options.tokens
        model = ours("auto", options)
        self.parameters: int = model.num_parameters()
        model.save_pretrained(folder)
        self.models: dict[str, Any] = {}
        for name in formats:
            how: Row = {"dtype": torch.bfloat16 if name == "bf16" else torch.float32}
            if name in BITS:
                try:
                    how["quantization_config"] = TokenQuantization(bits=BITS[name])
                except ValueError as error:
                    progress(f"no {name}: {error}")
                    continue
            self.models[name] = TokenformerForCausalLM.from_pretrained(folder, **how)

    def bytes(self, name: str) -> int:
        """Return the bytes of the weights, all of which every token reads."""
        tensors = [*self.models[name].parameters(), *self.models[name].buffers()]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        return sum(storages.values())

    def measure(self, name: str, context: int) -> Row:
        """Return the seconds to the first token and the median of the others."""
        ids = torch.randint(self.models[name].config.vocab_size, (1, context))
        first, others = Decoder(self.models[name], ids, self.tokens)()
        return {"first": first, "others": statistics.median(others)}


def measure_context(
    models: OurModels, llama: LlamaCpp, context: int, options: Namespace
) -> Iterator[Row]:
    """Measure all formats after `context` tokens, in interleaved rounds."""
    cache = 2 * options.layers * options.width * context
    weights = torch.randn(models.parameters + cache)
    rounds: list[dict[str, Row]] = []
    reading: list[float] = []
    for round_number in range(options.rounds + 1):  # the first is a warm-up
        progress(f"llama.cpp, after {context} tokens, round {round_number} of {options.rounds}")
        reading.append(statistics.median(seconds_of(weights.sum) for _ in range(options.tokens)))
        times = {}
        for name in models.models:
            times[name] = models.measure(name, context)
            times[FORMATS[name]] = llama.measure(FORMATS[name], context)
        rounds.append(times)
    rounds, reading = rounds[1:], reading[1:]
    speeds = [4 * weights.numel() / seconds for seconds in reading]
    case = {
        "case": f"{models.parameters / 1e6:.0f}M after {context}",
        "context": context,
        "parameters": models.parameters,
        "limit_gbytes": statistics.median(speeds) / 1e9,
        "threads": options.threads,
        "llama_cpp_python": llama.version,
    }
    for name in models.models:
        theirs = FORMATS[name]
        # Our quantized models compute in fp32, which is then the dtype of the KV cache.
        bytes_read = models.bytes(name) + (2 if name == "bf16" else 4) * cache
        row = timing(rounds, name, [bytes_read / speed for speed in speeds])
        for key, part in (("times_llama", "others"), ("first_times_llama", "first")):
            both = ([times[side][part] for times in rounds] for side in (name, theirs))
            row[key], row[f"{key}_spread"] = ratio(*both)
        yield {**case, **row, "name": name}
        bytes_read = llama.bytes[theirs] + 2 * cache
        row = timing(rounds, theirs, [bytes_read / speed for speed in speeds])
        yield {**case, **row, "name": f"llama.cpp {theirs}"}


def timing(rounds: list[dict[str, Row]], name: str, limit: list[float]) -> Row:
    """Return the median times of one side, and its share of the limit's speed."""
    first, others = ([times[name][part] for times in rounds] for part in ("first", "others"))
    share, spread = ratio(limit, others)
    row = {"seconds": statistics.median(others), "share": share, "share_spread": spread}
    return {**row, "first_seconds": statistics.median(first)}


def measure(options: Namespace) -> Iterator[Row]:
    options.rounds = options.rounds or (11 if options.full else 5)
    torch.set_num_threads(options.threads)
    options.length = max(options.contexts) + options.tokens
    options.ffn_tokens = options.ffn_tokens or 3 * options.width
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        models = OurModels(folder, options.formats, options)
        sizes = (options.width, options.layers, options.vocab)
        hidden = feed_forward_size(models.parameters, *sizes)
        shape = {
            "width": options.width,
            "layers": options.layers,
            "heads": max(1, options.width // 64),
            "hidden": hidden,
            "vocab": options.vocab,
            "length": options.length,
        }
        progress(
            f"{models.parameters:,} parameters; llama.cpp has {llama_parameters(hidden, *sizes):,} "
            f"with a feed-forward size of {hidden:,}"
        )
        formats = [FORMATS[name] for name in models.models]
        with LlamaCpp(folder, formats, shape, options) as llama:
            for context in options.contexts:
                yield from measure_context(models, llama, context, options)


def main(arguments: list[str] | None = None) -> None:
    layers, vocab = SIZES["124m"]
    parser = make_parser(__doc__)
    parser.add_argument("--python", required=True, help="a Python with llama_cpp and gguf")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--contexts", type=int, nargs="+", default=[128, 1024])
    parser.add_argument("--tokens", type=int, default=32, help="tokens to decode")
    parser.add_argument(
        "--threads", type=int, default=torch.get_num_threads(), help="of both; 1 if others run"
    )
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--layers", type=int, default=layers)
    parser.add_argument("--vocab", type=int, default=vocab)
    parser.add_argument("--ffn_tokens", type=int, help="default: three times the width")
    run("llama_cpp", measure, COLUMNS, parser.parse_args(arguments), axes=("context",))


if __name__ == "__main__":
    main()
