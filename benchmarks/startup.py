"""CPU time of whole commands, from the shell to their last line, against imports alone.

    python -m benchmarks.startup

CPU seconds (user and system) of a fresh process, so that other load on the machine counts little.
The limit is `import torch`, which every command that computes needs. The baseline generates one
token with transformers' GPT-NeoX of about the same size. The page cache is warm.
"""

import os
import statistics
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

from benchmarks.harness import make_parser, number, progress, ratio, run, with_spread
from benchmarks.results import Row

COLUMNS = {
    "CPU s": number("seconds"),
    "x import torch": with_spread("times_torch"),
    "x GPT-NeoX": with_spread("times_GPT-NeoX"),
}
GPT_NEOX = """
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer
model, tokenizer = (c.from_pretrained(sys.argv[1]) for c in (AutoModelForCausalLM, AutoTokenizer))
inputs = tokenizer("def main", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=1, do_sample=False)[0]))
"""
THREADS = {"OMP_NUM_THREADS": "1"}
"""A small model has no use for more, and threads that wait would count as CPU time."""


def make_models(folder: Path) -> tuple[Path, Path]:
    """Save a small byte-level TokenFormer and a GPT-NeoX with its tokenizer."""
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM
    from transformers.utils import logging

    from tokenformer import TokenformerConfig, TokenformerForCausalLM
    from tokenformer.data.byte_tokenizer import END_OF_TEXT, VOCAB_SIZE, byte_tokenizer

    logging.disable_progress_bar()
    ends = {"bos_token_id": END_OF_TEXT, "eos_token_id": END_OF_TEXT}
    shape = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    tokenformer = TokenformerForCausalLM(TokenformerConfig(vocab_size=VOCAB_SIZE, **shape, **ends))
    neox = GPTNeoXConfig(vocab_size=VOCAB_SIZE, intermediate_size=512, **shape, **ends)
    folders = folder / "tokenformer", folder / "neox"
    for path, model in zip(folders, (tokenformer, GPTNeoXForCausalLM(neox)), strict=True):
        model.save_pretrained(path)
        byte_tokenizer().save_pretrained(path)
    return folders


def cpu_seconds(command: list[str]) -> float:
    """Run a command; return its CPU time, user and system."""
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env={**os.environ, **THREADS}
    )
    assert process.stderr is not None
    message = process.stderr.read().decode(errors="replace")
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    process.stderr.close()
    if process.returncode:
        raise SystemExit(f"{' '.join(command[-3:])} failed:\n{message}")
    return usage.ru_utime + usage.ru_stime


def measure(options: Namespace) -> Iterator[Row]:
    rounds = options.rounds or (11 if options.full else 5)
    python, tokenformer = [sys.executable], [sys.executable, "-m", "tokenformer"]
    with tempfile.TemporaryDirectory() as temporary:
        ours, theirs = map(str, make_models(Path(temporary)))
        short = ["--prompt", "def main", "--max_new_tokens", "1"]
        commands = {
            "import torch": [*python, "-c", "import torch"],
            "import transformers": [*python, "-c", "from transformers import GPTNeoXForCausalLM"],
            "GPT-NeoX, one token": [*python, "-c", GPT_NEOX, theirs],
            "tokenformer --help": [*tokenformer, "--help"],
            "inspect": [*tokenformer, "inspect", ours],
            "generate, one token": [*tokenformer, "generate", ours, *short],
        }
        times: dict[str, list[float]] = {name: [] for name in commands}
        for round_number in range(rounds + 1):  # the first is a warm-up
            progress(f"startup, round {round_number} of {rounds}")
            for name, command in commands.items():
                seconds = cpu_seconds(command)
                if round_number:
                    times[name].append(seconds)
    for name, seconds in times.items():
        row: Row = {"case": "CPU time of a command", "name": name}
        row["seconds"] = statistics.median(seconds)
        for key, baseline in (("torch", "import torch"), ("GPT-NeoX", "GPT-NeoX, one token")):
            row[f"times_{key}"], row[f"times_{key}_spread"] = ratio(seconds, times[baseline])
        yield row


def main(arguments: list[str] | None = None) -> None:
    run("startup", measure, COLUMNS, make_parser(__doc__).parse_args(arguments))


if __name__ == "__main__":
    main()
