"""Hostile files: they try to run code, fill memory or disk, run forever, or read or write outside
their folder. Each must be refused with one line or do nothing; a canary shows whether code ran."""

import json
import random
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tests.campaign import payloads, server
from tests.campaign.damage import relist
from tests.campaign.processes import Ended, Limits, tokenformer
from tests.campaign.runs import Subject
from tests.campaign.trials import Outcome

MEMORY = 2 << 30
"""Bytes of address space that a command may allocate."""
RESIDENT = 1 << 30
"""Bytes of resident memory that a command may use."""
DISK = 1 << 27
TIME = 120.0
BOMB = 1 << 29
"""Bytes that an archive expands to."""
PROMPT = ("--prompt", "key", "--max_new_tokens", "4", "--greedy")

Build = Callable[[Path, Path], Sequence[str]]
"""Takes a folder and the canary, writes the files, returns the command that reads them."""


class Hostile:
    name = "hostile"

    def __init__(self, wanted: int | None, subject: Subject, corpus: Path) -> None:
        """Return `wanted` cases, or all."""
        self.subject, self.reference, self.corpus = subject, subject.reference, corpus
        self.cases = self.all_cases()
        self.wanted = len(self.cases) if wanted is None else wanted

    def planned(self) -> int:
        return len(self.cases)

    def trial(self, index: int, chance: random.Random, place: Path) -> Outcome:
        kind, build = self.cases[index]
        canary = place / "canary"
        command = build(place, canary)
        limits = Limits(seconds=TIME, memory=MEMORY, disk=DISK + folder_size(place), folder=place)
        problem = ""
        if command[0] == "serve":
            ended, problem = server.ask(command, place / "log", limits)
        else:
            ended = tokenformer(command, place / "log", limits=limits).end()
        ran = any(path.exists() for path in place.parent.rglob(canary.name))
        return judge(kind, ended, "code ran" if ran else problem, " ".join(command))

    def all_cases(self) -> list[tuple[str, Build]]:
        model = [(f"model: {kind}", build) for kind, build in self.model_cases().items()]
        run = [(f"run: {kind}", build) for kind, build in self.run_cases().items()]
        data = [(f"data: {kind}", build) for kind, build in self.data_cases().items()]
        cases = [*model, *run, *data]
        random.Random(0).shuffle(cases)  # some of each in a short campaign
        return cases

    def model_cases(self) -> dict[str, Build]:
        cases: dict[str, Build] = {
            f"tensor file is {kind}": partial(self.tensor_file, make)
            for kind, make in payloads.TENSOR_FILES.items()
        }
        cases |= {
            f"config with {kind}": partial(self.config, change) for kind, change in CONFIGS.items()
        }
        cases |= {
            f"chat template with {kind}": partial(self.template, kind) for kind in server.TEMPLATES
        }
        return cases | {
            "code of its own": partial(self.code, {}),
            "code of its own, unknown type": partial(self.code, {"model_type": "hostile"}),
            "tokenizer with code": self.tokenizer_code,
            "tokenizer is garbage": partial(self.text, "tokenizer.json", "[" * 100_000),
            "generation config is garbage": partial(self.text, "generation_config.json", "[[["),
            "config is null": partial(self.text, "config.json", "null"),
            "config of brackets": partial(self.text, "config.json", "[" * 200_000),
            "pickled weights": partial(self.pickled, payloads.pickled, "generate"),
            "torch archive as weights": partial(self.pickled, payloads.torch_saved, "generate"),
            "pickled weights, grown": partial(self.pickled, payloads.torch_saved, "grow"),
            "pickle, converted": self.converted,
            "index outside its folder": partial(self.index, "../../outside.safetensors"),
            "index at an absolute path": partial(self.index, "/etc/passwd"),
            "weights that are a device": self.device,
        }

    def run_cases(self) -> dict[str, Build]:
        cases: dict[str, Build] = {
            f"recipe with {kind}": partial(self.recipe, text)
            for kind, text in payloads.YAML_DOCUMENTS.items()
        }
        cases |= {f"recipe with code {n + 1}": partial(self.recipe_code, n) for n in range(4)}
        cases |= {f"record with code {n + 1}": partial(self.record_code, n) for n in range(2)}
        cases |= {
            f"checkpoint: tensor file is {kind}": partial(self.checkpoint, make)
            for kind, make in payloads.TENSOR_FILES.items()
        }
        return cases | {
            "record of nested aliases": partial(self.record, payloads.YAML_BOMB),
            "torn record": partial(self.record, "model:\n  options: {hidden"),
            "checkpoint with pickles": self.pickles,
            "manifest outside its folder": self.manifest,
            "metrics of brackets": partial(self.metrics, "[" * 100_000),
            "metrics without a step": partial(self.metrics, '{"loss": 1.0}'),
        }

    def data_cases(self) -> dict[str, Build]:
        return {
            "gzip bomb": partial(self.prepare, "a.txt.gz", lambda _: payloads.gzip_bomb(BOMB)),
            "zip bomb": partial(self.prepare, "a.zip", lambda _: payloads.zip_bomb(BOMB)),
            "zip with names outside": partial(self.prepare, "a.zip", payloads.zip_outside),
            "pickle as jsonl": partial(self.prepare, "a.jsonl", payloads.pickled),
            "pickle as parquet": partial(self.prepare, "a.parquet", payloads.pickled),
            "brackets as jsonl": partial(self.prepare, "a.jsonl", lambda _: b"[" * 1_000_000),
            "corpus index outside": self.corpus_index,
            "pickled CIFAR": partial(self.images, "data_batch_1", payloads.pickled),
            "huge picture": partial(
                self.images, "val/a/a.png", lambda _: payloads.png(12_000, 12_000)
            ),
        }

    def copied_model(self, place: Path) -> Path:
        return Path(shutil.copytree(self.reference.run / "model", place / "model"))

    def copied_run(self, place: Path) -> tuple[Path, list[str]]:
        run = self.subject.copy(place)
        return run, ["train", str(self.reference.recipe), "--out", str(run)]

    def tensor_file(self, make: Callable[[Path], bytes], place: Path, canary: Path) -> list[str]:
        model = self.copied_model(place)
        (model / "model.safetensors").write_bytes(make(canary))
        return ["generate", str(model), *PROMPT]

    def config(self, change: dict[str, Any], place: Path, canary: Path) -> list[str]:
        model = self.copied_model(place)
        edit(model / "config.json", change)
        return ["generate", str(model), *PROMPT]

    def code(self, change: dict[str, Any], place: Path, canary: Path) -> list[str]:
        model = self.copied_model(place)
        (model / "hostile.py").write_text(payloads.python_code(canary))
        classes = {"AutoConfig": "hostile.Config", "AutoModelForCausalLM": "hostile.Model"}
        edit(model / "config.json", {"auto_map": classes, **change})
        return ["generate", str(model), *PROMPT]

    def tokenizer_code(self, place: Path, canary: Path) -> list[str]:
        model = self.copied_model(place)
        (model / "hostile.py").write_text(payloads.python_code(canary))
        own = {"AutoTokenizer": ["hostile.Tokenizer", "hostile.Tokenizer"]}
        edit(model / "tokenizer_config.json", {"auto_map": own, "tokenizer_class": "Tokenizer"})
        return ["generate", str(model), *PROMPT]

    def text(self, name: str, text: str, place: Path, canary: Path) -> list[str]:
        model = self.copied_model(place)
        (model / name).write_text(text)
        return ["generate", str(model), *PROMPT]

    def template(self, kind: str, place: Path, canary: Path) -> list[str]:
        model = self.copied_model(place)
        server.write_template(model, kind, canary)
        return ["serve", str(model), "--port", "0"]

    def pickled(
        self, make: Callable[[Path], bytes], verb: str, place: Path, canary: Path
    ) -> list[str]:
        model = self.copied_model(place)
        (model / "model.safetensors").unlink()
        (model / "pytorch_model.bin").write_bytes(make(canary))
        if verb == "grow":
            return ["grow", str(model), "--ffn_tokens", "64", "--out", str(place / "grown")]
        return ["generate", str(model), *PROMPT]

    def converted(self, place: Path, canary: Path) -> list[str]:
        (place / "hostile.pt").write_bytes(payloads.torch_saved(canary))
        return ["convert", str(place / "hostile.pt"), "--out", str(place / "out")]

    def index(self, target: str, place: Path, canary: Path) -> list[str]:
        model = Path(shutil.copytree(self.reference.run / "model", place / "deep" / "model"))
        shutil.move(model / "model.safetensors", place / "outside.safetensors")
        names = tensor_names(place / "outside.safetensors")
        index = {"metadata": {}, "weight_map": dict.fromkeys(names, target)}
        (model / "model.safetensors.index.json").write_text(json.dumps(index))
        return ["generate", str(model), *PROMPT]

    def device(self, place: Path, canary: Path) -> list[str]:
        model = self.copied_model(place)
        (model / "model.safetensors").unlink()
        (model / "model.safetensors").symlink_to("/dev/zero")
        return ["generate", str(model), *PROMPT]

    def recipe(self, text: str, place: Path, canary: Path) -> list[str]:
        (place / "hostile.yaml").write_text(text)
        return ["train", str(place / "hostile.yaml"), "--out", str(place / "run")]

    def recipe_code(self, number: int, place: Path, canary: Path) -> list[str]:
        return self.recipe(payloads.yaml_code(canary)[number], place, canary)

    def record(self, text: str, place: Path, canary: Path) -> list[str]:
        run, command = self.copied_run(place)
        (run / "config.yaml").write_text(text)
        return command

    def record_code(self, number: int, place: Path, canary: Path) -> list[str]:
        return self.record(payloads.yaml_code(canary)[number], place, canary)

    def checkpoint(self, make: Callable[[Path], bytes], place: Path, canary: Path) -> list[str]:
        """Update the hashes, as an attacker would."""
        run, command = self.copied_run(place)
        for checkpoint in (run / "checkpoints").glob("step-*"):
            for shard in checkpoint.glob("*.safetensors"):
                shard.write_bytes(make(canary))
            relist(checkpoint)
        return command

    def pickles(self, place: Path, canary: Path) -> list[str]:
        run, command = self.copied_run(place)
        for checkpoint in (run / "checkpoints").glob("step-*"):
            for name in (".metadata", "__0_0.distcp", "optimizer.pt", "rng.pkl", "scaler.bin"):
                (checkpoint / name).write_bytes(payloads.pickled(canary))
        return command

    def manifest(self, place: Path, canary: Path) -> list[str]:
        run, command = self.copied_run(place)
        for checkpoint in (run / "checkpoints").glob("step-*"):
            document = json.loads((checkpoint / "manifest.json").read_text())
            document["files"]["../../../../../../etc/passwd"] = {"size": 1, "sha256": "0"}
            (checkpoint / "manifest.json").write_text(json.dumps(document))
        return command

    def metrics(self, line: str, place: Path, canary: Path) -> list[str]:
        run, command = self.copied_run(place)
        rows = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
        (run / "metrics.jsonl").write_text("".join([*rows[:3], line + "\n", *rows[3:]]))
        return command

    def prepare(
        self, name: str, make: Callable[[Path], bytes], place: Path, canary: Path
    ) -> list[str]:
        (place / name).write_bytes(make(canary))
        return ["prepare", str(place / name), "--out", str(place / "corpus"), "--workers", "1"]

    def corpus_index(self, place: Path, canary: Path) -> list[str]:
        corpus = Path(shutil.copytree(self.corpus, place / "corpus"))
        document = json.loads((corpus / "index.json").read_text())
        document["splits"]["train"]["shards"][0]["file"] = "../../../../etc/passwd"
        (corpus / "index.json").write_text(json.dumps(document))
        options = ["--data.corpus", str(corpus), "--out", str(place / "run"), "--max_steps", "2"]
        return ["train", str(self.reference.recipe), *options]

    def images(
        self, name: str, make: Callable[[Path], bytes], place: Path, canary: Path
    ) -> list[str]:
        (place / "images" / name).parent.mkdir(parents=True)
        (place / "images" / name).write_bytes(make(canary))
        if name.endswith(".png"):  # a split of two classes, the other one harmless
            for other in ("train/a", "train/b", "val/b"):
                (place / "images" / other).mkdir(parents=True)
                (place / "images" / other / "b.png").write_bytes(payloads.png(16, 16))
        options = '{"image_size": 16, "patch_size": 8, "hidden_size": 16, "num_hidden_layers": 1}'
        (place / "images.yaml").write_text(f'{{"model": {{"options": {options}}}}}')
        steps = ["--run.batch_size", "2", "--run.steps", "2", "--run.log_to", "[]"]
        data = ["--data.images", str(place / "images"), "--out", str(place / "run")]
        return ["train", str(place / "images.yaml"), *data, *steps]


CONFIGS: dict[str, dict[str, Any]] = {
    "no hidden size": {"hidden_size": None},
    "a huge hidden size": {"hidden_size": 1 << 40},
    "weights of 100 GB": {"hidden_size": 1 << 14, "ffn_tokens": 1 << 20},
    "a billion layers": {"num_hidden_layers": 10**9},
    "a huge vocabulary": {"vocab_size": 1 << 40},
    "negative sizes": {"qkv_tokens": -4},
    "a type that is none": {"dtype": "__import__('os')"},
    "an unknown quantizer": {"quantization_config": {"quant_method": "hostile"}},
}


TO_BE_REFUSED = ("model: index outside its folder", "run: manifest outside its folder")
"""Cases that must fail: success would mean that a file outside the folder was read."""


def judge(kind: str, ended: Ended, problem: str, command: str) -> Outcome:
    detail = f"{command}: {ended.output[-1500:]}"
    if problem:
        return Outcome(False, problem, [kind], detail)
    if ended.overrun:
        return Outcome(False, ended.overrun, [kind], detail)
    if ended.has_traceback or ended.code not in (0, 1, 2):
        word = "traceback" if ended.has_traceback else f"ended with {ended.code}"
        return Outcome(False, word, [kind], detail)
    if kind in TO_BE_REFUSED and not ended.code:
        return Outcome(False, "believed", [kind], detail)
    if ended.memory - address_resident() > RESIDENT:
        return Outcome(False, "too much memory", [kind], f"{ended.memory >> 20} MB; {detail}")
    return Outcome(True, "refused" if ended.code else "harmless", [kind])


def address_resident() -> int:
    """Return the address space of this process, which its forks start with."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def folder_size(place: Path) -> int:
    return sum(path.lstat().st_size for path in place.rglob("*"))


def edit(file: Path, change: dict[str, Any]) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))


def tensor_names(file: Path) -> list[str]:
    data = file.read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return [name for name in header if name != "__metadata__"]
