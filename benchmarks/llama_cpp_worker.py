"""The llama.cpp side of `benchmarks.llama_cpp`: needs llama_cpp, gguf and numpy, and nothing else.

It is run as `python -c SOURCE JSON`, since in this folder `operator.py` would shadow the standard
library's. It writes a Llama with random weights for each format and loads all of them. From then on
a line with a format and a context on stdin measures one round, whose times are a line on stdout.
"""

import ctypes
import json
import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np


def write_model(path: Path, format_name: str, shape: dict[str, int]) -> int:
    """Write a model without vocabulary and with a tied output head. Return the bytes of its
    weights, all of which every token reads."""
    width, layers, hidden = shape["width"], shape["layers"], shape["hidden"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(shape["length"])
    writer.add_embedding_length(width)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(hidden)
    writer.add_head_count(shape["heads"])
    writer.add_head_count_kv(shape["heads"])
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(width // shape["heads"])
    writer.add_vocab_size(shape["vocab"])
    writer.add_tokenizer_model("no_vocab")
    matrices = {"token_embd": (shape["vocab"], width)}
    norms = ["output_norm"]
    for layer in range(layers):
        block = f"blk.{layer}"
        matrices |= {f"{block}.attn_{part}": (width, width) for part in ("q", "k", "v", "output")}
        matrices |= {f"{block}.ffn_{part}": (hidden, width) for part in ("gate", "up")}
        matrices[f"{block}.ffn_down"] = (width, hidden)
        norms += [f"{block}.attn_norm", f"{block}.ffn_norm"]
    quantization = gguf.GGMLQuantizationType[format_name]
    random, size = np.random.default_rng(0), 0
    for name, (rows, columns) in matrices.items():
        values = random.standard_normal((rows, columns), dtype=np.float32) * columns**-0.5
        data = gguf.quants.quantize(values, quantization)
        writer.add_tensor(f"{name}.weight", data, raw_dtype=quantization)
        size += data.nbytes
    for name in norms:
        writer.add_tensor(f"{name}.weight", np.ones(width, dtype=np.float32))
        size += 4 * width
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return size


class Decoder:
    """A loaded model that decodes greedily, one token at a time."""

    def __init__(self, path: Path, length: int, threads: int, vocab: int) -> None:
        self.vocab = vocab
        model_options = llama_cpp.llama_model_default_params()
        model_options.n_gpu_layers = 0
        model = llama_cpp.llama_model_load_from_file(bytes(path), model_options)
        options = llama_cpp.llama_context_default_params()
        options.n_ctx = options.n_batch = length
        options.n_threads = options.n_threads_batch = threads
        self.context = llama_cpp.llama_init_from_model(model, options)
        if self.context is None:
            raise RuntimeError(f"llama.cpp cannot load {path.name}")

    def next_token(self, tokens: list[int]) -> int:
        """Append tokens to the KV cache and return the most likely next one."""
        array = (llama_cpp.llama_token * len(tokens))(*tokens)
        batch = llama_cpp.llama_batch_get_one(array, len(tokens))
        if llama_cpp.llama_decode(self.context, batch):
            raise RuntimeError("llama_decode failed")
        logits = llama_cpp.llama_get_logits_ith(self.context, -1)
        return int(np.ctypeslib.as_array(logits, shape=(self.vocab,)).argmax())

    def measure(self, prompt: list[int], tokens: int) -> dict[str, float]:
        """Return the seconds to the first token and the median of the others."""
        memory = llama_cpp.llama_get_memory(self.context)
        llama_cpp.llama_memory_clear(memory, True)
        start = time.perf_counter()
        token = self.next_token(prompt)
        times = [time.perf_counter()]
        for _ in range(tokens - 1):
            token = self.next_token([token])
            times.append(time.perf_counter())
        others = [after - before for before, after in pairwise(times)]
        return {"first": times[0] - start, "others": statistics.median(others)}


@llama_cpp.llama_log_callback
def no_log(level: int, text: bytes, data: Any) -> None:
    """llama.cpp logs hundreds of lines about every model."""


def main() -> None:
    options = json.loads(sys.argv[1])
    shape = options["shape"]
    llama_cpp.llama_log_set(no_log, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    decoders, sizes = {}, {}
    for name in options["formats"]:
        path = Path(options["folder"]) / f"{name}.gguf"
        sizes[name] = write_model(path, name, shape)
        decoders[name] = Decoder(path, shape["length"], options["threads"], shape["vocab"])
    answer({"version": llama_cpp.__version__, "bytes": sizes})
    for line in sys.stdin:
        name, context = json.loads(line)
        prompt = np.random.default_rng(1).integers(shape["vocab"], size=context).tolist()
        answer(decoders[name].measure(prompt, options["tokens"]))


def answer(value: Any) -> None:
    print(json.dumps(value), flush=True)


main()
