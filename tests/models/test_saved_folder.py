"""A saved folder has a card, checksums and a stub for `trust_remote_code`."""

import json
import os
import re
import subprocess
import sys
import threading
from base64 import b64decode
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
import yaml
from transformers import AutoConfig, AutoImageProcessor, AutoModelForCausalLM

import tokenformer
from tokenformer.cli import main
from tokenformer.data.byte_tokenizer import VOCAB_SIZE, byte_tokenizer
from tokenformer.models.loading import load_tokenformer
from tokenformer.models.model_card import CARD, is_edited, read_history, write_card
from tokenformer.models.saved_folder import RESAVED, STUB

Make = Callable[..., Any]
SHAPE = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}


@pytest.fixture
def model() -> Any:
    torch.manual_seed(0)
    config = tokenformer.TokenformerConfig(
        **SHAPE, vocab_size=VOCAB_SIZE, qkv_tokens=24, output_tokens=20, ffn_tokens=44
    )
    return tokenformer.TokenformerForCausalLM(config)


def front_matter(folder: Path) -> dict[str, Any]:
    _, front, _ = (folder / CARD).read_text().split("---\n", 2)
    found: dict[str, Any] = yaml.safe_load(front)
    return found


def test_every_class_writes_a_card(model: Any, tmp_path: Path) -> None:
    vision = {"image_size": 8, "patch_size": 4, "num_labels": 5, **SHAPE}
    models = {
        "text-generation": model,
        "feature-extraction": model.model,
        "image-classification": tokenformer.TokenformerForImageClassification(
            tokenformer.TokenformerVisionConfig(**vision)
        ),
    }
    plain = tokenformer.TransformerForCausalLM(tokenformer.TransformerConfig(vocab_size=9, **SHAPE))
    plain.save_pretrained(tmp_path / "plain")
    assert front_matter(tmp_path / "plain")["tags"] == ["tokenformer", "transformer"]
    for task, each in models.items():
        folder = tmp_path / task
        each.save_pretrained(folder)
        found, text = front_matter(folder), (folder / CARD).read_text()
        assert found["library_name"] == "tokenformer"
        assert found["pipeline_tag"] == task
        assert found["tags"] == ["tokenformer", "pattention"]
        assert "license" not in found
        assert text.index("import tokenformer  #") < text.index(".from_pretrained")
        assert type(each).__name__ in text
    text = (tmp_path / "text-generation" / CARD).read_text()
    assert f"| parameters | {model.num_parameters():,} |" in text
    assert "| parameter tokens per layer, feed-forward | 44 |" in text
    assert "| context length | 2,048 |" in text
    code = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert code is not None
    byte_tokenizer().save_pretrained(tmp_path / "text-generation")
    made: dict[str, Any] = {}
    exec(code[1].replace("THIS_FOLDER", str(tmp_path / "text-generation")), made)
    assert type(made["model"]) is type(model)


def test_an_edited_card_is_kept(model: Any, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    card = tmp_path / CARD
    assert not is_edited(tmp_path)
    # The front matter is the user's, and does not freeze the rest.
    card.write_text(card.read_text().replace("# license: add", "license: mit\n# add"))
    write_card(tmp_path, model.config, ["Trained"])
    assert front_matter(tmp_path)["license"] == "mit"
    assert read_history(tmp_path) == ["Trained"]
    assert not is_edited(tmp_path)
    for edited in (card.read_text().replace("TokenFormer", "My TokenFormer"), "# Mine\n"):
        card.write_text(edited)
        model.save_pretrained(tmp_path)
        assert card.read_text() == edited


def test_saving_leaves_the_model_as_it_was(model: Any, tmp_path: Path) -> None:
    before = model.config.to_dict()
    model.save_pretrained(tmp_path)
    after = model.config.to_dict()
    assert {n for n in after if after[n] != before.get(n)} <= {"architectures", "dtype"}
    loaded = AutoConfig.from_pretrained(tmp_path, trust_remote_code=False)
    assert loaded.auto_map["AutoModelForCausalLM"] == f"{STUB[:-3]}.TokenformerForCausalLM"
    assert type(loaded).from_dict(loaded.to_dict()).auto_map == loaded.auto_map


WITHOUT_IMPORT = """
import os, sys
folder, again = FOLDERS
sys.modules["tokenformer"] = None
from transformers import AutoModelForCausalLM, AutoConfig, pipeline
try:
    AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
except ImportError as error:
    assert "install it from its repository or a wheel" in str(error), error
del sys.modules["tokenformer"]
try:
    AutoModelForCausalLM.from_pretrained(folder)
except ValueError as error:
    assert "trust_remote_code=True" in str(error), error
assert "tokenformer" not in sys.modules
try:
    from lm_eval.models.huggingface import HFLM
    model = HFLM(pretrained=folder, trust_remote_code=True, device="cpu", batch_size=1).model
except ImportError:
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
assert type(model).__module__ == "tokenformer.models.language", type(model)
model.save_pretrained(again)
assert sorted(os.listdir(again)) == sorted(set(os.listdir(folder)) - {TOKENIZER})
model = AutoModelForCausalLM.from_pretrained(again, trust_remote_code=True)
generator = pipeline("text-generation", folder, trust_remote_code=True, device="cpu")
assert type(generator.model) is type(model)
print("loaded")
"""


def test_without_the_import_the_stub_loads_it(model: Any, tmp_path: Path) -> None:
    """In a process of its own, whose standard input would answer "y" if it were asked."""
    folder, again = tmp_path / "model", tmp_path / "again"
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    names = '"tokenizer.json", "tokenizer_config.json"'
    program = WITHOUT_IMPORT.replace("FOLDERS", repr((str(folder), str(again))))
    environment = {**os.environ, "HF_MODULES_CACHE": str(tmp_path / "code"), "HF_HUB_OFFLINE": "1"}
    run = subprocess.run(
        [sys.executable, "-c", program.replace("TOKENIZER", names)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env=environment,
        stdin=subprocess.DEVNULL,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip().endswith("loaded")
    assert (folder / "config.json").read_text() == (again / "config.json").read_text()


def test_with_the_import_the_stub_is_not_run(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, ran = tmp_path / "model", tmp_path / "ran"
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    (folder / STUB).write_text(f"open({str(ran)!r}, 'w').close()\n")
    monkeypatch.setattr("builtins.input", lambda *words: "y")
    for trust in (None, False, True):
        loaded = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=trust)
        assert type(loaded) is type(model)
    main(["generate", str(folder), "--prompt", "a", "--max_new_tokens", "2"])
    main(["grow", str(folder), "--ffn_tokens", "50", "--out", str(tmp_path / "grown")])
    assert "Saved to" in capsys.readouterr().out
    assert not ran.exists()


def test_the_card_lists_the_history(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("All that is gold does not glitter. " * 200)
    main(["prepare", "text.txt", "--out", "gold"])
    (tmp_path / "tiny.yaml").write_text(
        yaml.safe_dump(
            {
                "model": {"options": {**SHAPE, "qkv_tokens": 24, "ffn_tokens": 44}},
                "data": {"corpus": "gold", "length": 16},
                "run": {"steps": 2, "batch_size": 2, "log_to": []},
            }
        )
    )
    main(["train", "tiny.yaml", "--out", "run"])
    trained = read_history(tmp_path / "run" / "model")
    assert len(trained) == 1
    assert trained[0].startswith(
        "Trained on gold: batches of 2 of length 16, seed 0; 2 steps; held"
    )
    assert str(tmp_path) not in (tmp_path / "run" / "model" / CARD).read_text()

    main(["grow", "run", "--ffn_tokens", "64", "--out", "grown"])
    main(["prune", "grown", "--out", "pruned"])
    main(["merge", "pruned", "pruned", "--out", "merged"])
    history = read_history(tmp_path / "merged")
    assert history[:1] == trained
    assert [line.split()[0] for line in history] == ["Trained", "Grown", "Pruned", "Merged"]
    assert history[1].startswith("Grown by tokens (init zero, ")
    assert "layers.0.ffn 44 to 64" in history[1]

    step = next((tmp_path / "run" / "checkpoints").iterdir())
    main(["convert", str(step), "--out", "converted"])
    assert read_history(tmp_path / "converted") == [
        *trained,
        f"Converted from {step.name} (checkpoint)",
    ]
    AutoModelForCausalLM.from_pretrained("merged").save_pretrained("again")
    assert read_history(tmp_path / "again") == [*history, RESAVED]

    mine = tmp_path / "run" / "model" / CARD
    mine.write_text("# Mine\n")
    main(["train", "tiny.yaml", "--out", "run"])
    assert mine.read_text() == "# Mine\n"


class Hub(BaseHTTPRequestHandler):
    """The part of the hub that an upload needs."""

    files: dict[str, bytes]

    def answer(self, document: Any, status: int = 200, **headers: str) -> None:
        body = json.dumps(document).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_POST(self) -> None:
        sent = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path.endswith("/create"):
            self.answer({"url": f"http://{self.headers['Host']}/me/tiny"})
        elif "/preupload/" in self.path:
            names = [file["path"] for file in json.loads(sent)["files"]]
            modes = [{"path": n, "uploadMode": "regular", "shouldIgnore": False} for n in names]
            self.answer({"files": modes})
        elif "/commit/" in self.path:
            for line in map(json.loads, sent.splitlines()):
                if line["key"] == "file":
                    self.files[line["value"]["path"]] = b64decode(line["value"]["content"])
            url = f"http://{self.headers['Host']}/me/tiny/commit/{'0' * 40}"
            self.answer({"commitUrl": url, "commitOid": "0" * 40})
        else:
            self.answer({})

    def do_GET(self) -> None:
        card = self.files.get(CARD)
        if not self.path.endswith(CARD) or card is None:
            self.answer({}, 404, X_Error_Code="EntryNotFound")
            return
        self.send_response(200)
        for name in ("ETag", "X-Repo-Commit"):
            self.send_header(name, f'"{len(card)}"' if name == "ETag" else f"{len(card):040}")
        self.send_header("Content-Length", str(len(card)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(card)

    def do_HEAD(self) -> None:
        self.do_GET()

    def log_message(self, *words: Any) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[dict[str, bytes]]:
    Hub.files = {}
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    address = f"http://127.0.0.1:{server.server_port}"
    for name in ("ENDPOINT", "HUGGINGFACE_CO_URL_TEMPLATE"):
        value = address + ("" if name == "ENDPOINT" else "/{repo_id}/resolve/{revision}/{filename}")
        monkeypatch.setattr(huggingface_hub.constants, name, value)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield Hub.files
    server.shutdown()
    server.server_close()
    thread.join(60)


def test_an_upload_takes_them_along(model: Any, hub: dict[str, bytes], tmp_path: Path) -> None:
    """transformers puts a card of its own in place, and uploads before `save_pretrained` ends."""
    model.push_to_hub("me/tiny", token="none")
    wanted = {CARD, STUB, "checksums.json", "config.json", "model.safetensors"}
    assert wanted <= hub.keys()
    assert b"import tokenformer" in hub[CARD]
    hub.clear()
    model.save_pretrained(tmp_path / "tiny", push_to_hub=True, repo_id="me/tiny", token="none")
    assert wanted <= hub.keys()
    assert b"import tokenformer" in hub[CARD]
    assert json.loads(hub["config.json"])["auto_map"]
    hub[CARD] = b"---\nlicense: mit\n---\n\n# Mine\n"
    model.push_to_hub("me/tiny", token="none")
    assert b"# Mine" in hub[CARD]
    assert b"import tokenformer" not in hub[CARD]


def test_the_weights_of_an_earlier_save_are_removed(model: Any, tmp_path: Path) -> None:
    """An old file next to newer shards would be loaded, an index without shards would fail."""
    for name, forms in {"a": ("5GB", "10KB"), "b": ("10KB", "5GB", "20KB")}.items():
        folder = tmp_path / name
        for number, size in enumerate(forms):
            with torch.no_grad():
                model.model.norm.weight.fill_(number + 1)
            model.save_pretrained(folder, max_shard_size=size)
            single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
            assert (single.exists(), index.exists()) == (size == "5GB", size != "5GB")
            loaded = AutoModelForCausalLM.from_pretrained(folder)
            assert torch.equal(loaded.model.norm.weight, model.model.norm.weight)
            listed = json.loads((folder / "checksums.json").read_text())["files"]
            assert listed.keys() == {file.name for file in folder.glob("model*.safetensors")}
            assert load_tokenformer(folder) is not None, "verified"


def test_a_path_that_is_a_file_is_left_to_transformers(model: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    model.save_pretrained(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


def test_a_configuration_alone_is_saved_without_the_stubs_auto_map(
    model: Any, tmp_path: Path
) -> None:
    model.save_pretrained(tmp_path / "model")
    loaded = AutoConfig.from_pretrained(tmp_path / "model", trust_remote_code=False)
    loaded.save_pretrained(tmp_path / "alone")
    assert "auto_map" not in json.loads((tmp_path / "alone" / "config.json").read_text())
    assert loaded.auto_map["AutoConfig"] == f"{STUB[:-3]}.TokenformerConfig"
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    again.save_pretrained(tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text())["auto_map"]
    loaded.auto_map = {"AutoConfig": "mine.Config"}
    loaded.save_pretrained(tmp_path / "alone")
    assert "mine.Config" in (tmp_path / "alone" / "config.json").read_text()


def test_the_users_front_matter_is_kept(model: Any, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    _, _, body = (tmp_path / CARD).read_text().split("---\n", 2)
    mine = "---\nlibrary_name: transformers\nlicense: mit\ndatasets:\n- gold\n---\n"
    (tmp_path / CARD).write_text(mine + body)
    model.save_pretrained(tmp_path)
    text = (tmp_path / CARD).read_text()
    assert text.startswith(mine)
    assert "import tokenformer" in text
    (tmp_path / CARD).write_text(body)
    model.save_pretrained(tmp_path)
    assert front_matter(tmp_path)["library_name"] == "tokenformer"


def test_keys_of_other_tools_do_not_replace_methods(model: Any, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    keys = {"scale": 1.0, "tokens": 10, "update": "x", "torch_dtype": "auto"}
    file.write_text(json.dumps({**json.loads(file.read_text()), **keys}))
    loaded = load_tokenformer(tmp_path / "model")
    assert loaded.config.tokens("ffn", 0) == 44
    assert loaded.config.scale("ffn", 0) == 44.0
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    again.save_pretrained(tmp_path / "again")
    saved = json.loads((tmp_path / "again" / "config.json").read_text())
    assert {name: saved[name] for name in ("scale", "tokens", "update")} == {
        "scale": 1.0,
        "tokens": 10,
        "update": "x",
    }
    assert "_shadowed" not in saved
    assert load_tokenformer(tmp_path / "again").config.tokens("q", 0) == 24


PROCESSOR_WITHOUT_IMPORT = """
import sys
from transformers import AutoImageProcessor, AutoModelForImageClassification
processor = AutoImageProcessor.from_pretrained(sys.argv[1], trust_remote_code=True)
assert processor.size["height"] == 8 and type(processor).__module__.startswith("tokenformer.")
processor.save_pretrained(sys.argv[2])
AutoImageProcessor.from_pretrained(sys.argv[2], trust_remote_code=True)
model = AutoModelForImageClassification.from_pretrained(sys.argv[1], trust_remote_code=True)
assert model.config.num_labels == 5
print("loaded")
"""


@pytest.mark.parametrize("first", ["model", "processor"])
def test_the_stub_loads_the_image_processor(first: str, tmp_path: Path) -> None:
    config = tokenformer.TokenformerVisionConfig(image_size=8, patch_size=4, num_labels=5, **SHAPE)
    folder, again, ran = tmp_path / "model", tmp_path / "again", tmp_path / "ran"
    both = [
        tokenformer.TokenformerForImageClassification(config),
        tokenformer.TokenformerImageProcessor.for_size(8),
    ]
    for each in both if first == "model" else both[::-1]:
        each.save_pretrained(folder)
    run = subprocess.run(
        [sys.executable, "-c", PROCESSOR_WITHOUT_IMPORT, str(folder), str(again)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env={**os.environ, "HF_MODULES_CACHE": str(tmp_path / "code"), "HF_HUB_OFFLINE": "1"},
        stdin=subprocess.DEVNULL,
    )
    assert run.stdout.strip().endswith("loaded"), run.stderr
    assert {file.name for file in again.iterdir()} == {STUB, "preprocessor_config.json"}
    (folder / STUB).write_text(f"open({str(ran)!r}, 'w').close()\n")
    for trust in (None, False, True):
        found = AutoImageProcessor.from_pretrained(folder, trust_remote_code=trust)
        assert type(found) is tokenformer.TokenformerImageProcessor
    assert not ran.exists()
