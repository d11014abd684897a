"""`tokenformer convert`: files, folders and hub names in, model folders out, or one line."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GPT2Config

import tokenformer
from tests.support.conversion import CONFIG, CodeOnUnpickle, make_state, released_logits
from tokenformer.cli import main
from tokenformer.data.byte_tokenizer import END_OF_TEXT, VOCAB_SIZE, byte_tokenizer


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A folder with the released folder `released`, of which it is the working folder."""
    (tmp_path / "released").mkdir()
    torch.save(make_state(), tmp_path / "released" / "pytorch_model.bin")
    (tmp_path / "released" / "config.json").write_text(json.dumps(CONFIG))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(words):
    main(words.split())


def test_a_folder_becomes_a_model_and_says_what_it_lacks(home, capsys):
    run("convert released --out ours")
    message = capsys.readouterr().out.splitlines()
    assert message[0] == ("released: 3 layers of width 64, 4 heads, 56,256 parameters in float32")
    assert message[1].startswith("no tokenizer found: give --tokenizer FILE")
    assert message[2] == "Saved to ours"
    model = AutoModelForCausalLM.from_pretrained("ours").double()
    ids = torch.arange(40)
    expected = released_logits(make_state(), ids)
    assert torch.allclose(model(ids[None]).logits[0], expected, rtol=1e-9)
    assert GenerationConfig.from_pretrained("ours").eos_token_id == 0
    assert model.config.max_position_embeddings == 128


def test_there_and_back_by_file_with_json(home, capsys):
    run("convert released/pytorch_model.bin --num_attention_heads 4 --out ours")
    capsys.readouterr()
    run("convert ours --to released --out back --json")
    assert json.loads(capsys.readouterr().out) == {
        "source": "ours",
        "kind": "tokenformer",
        "to": "released",
        "layers": 3,
        "width": 64,
        "heads": 4,
        "parameters": 56256,
        "dtype": "float32",
        "tokenizer": None,
        "image_processor": None,
    }
    first, second = (
        torch.load(f"{kind}/pytorch_model.bin", weights_only=True) for kind in ("released", "back")
    )
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_the_tokenizer_beside_it_goes_along_both_ways(home, capsys):
    torch.save(make_state(vocabulary=VOCAB_SIZE), home / "released" / "pytorch_model.bin")
    byte_tokenizer().save_pretrained("released")
    run("convert released --out ours")
    assert "tokenizer from released/tokenizer.json" in capsys.readouterr().out
    assert AutoTokenizer.from_pretrained("ours")("é").input_ids == list("é".encode())
    assert AutoModelForCausalLM.from_pretrained("ours").config.eos_token_id == END_OF_TEXT
    assert GenerationConfig.from_pretrained("ours").eos_token_id == END_OF_TEXT
    run("generate ours --prompt Hello --max_new_tokens 5")
    run("convert ours --to released --out back")
    assert AutoTokenizer.from_pretrained("back")("é").input_ids == list("é".encode())


def test_the_tokenizer_of_the_released_models(home, real_data, capsys):
    torch.save(make_state(vocabulary=50304), home / "released" / "pytorch_model.bin")
    file = real_data("tokenizer/20B_tokenizer.json")
    run(f"convert released --tokenizer {file} --out ours")
    text = "def f(x):\n        return  x  # naïve ①, 日本語\n\n\n<|endoftext|>Tokens."
    expected = Tokenizer.from_file(str(file)).encode(text).ids
    tokenizer = AutoTokenizer.from_pretrained("ours")
    assert tokenizer(text).input_ids == expected
    assert tokenizer.eos_token_id == 0
    assert GenerationConfig.from_pretrained("ours").eos_token_id == 0


@pytest.fixture(scope="module")
def misfits(tmp_path_factory):
    """A folder of what cannot be converted, or not without an option."""
    folder = tmp_path_factory.mktemp("misfits")
    (folder / "released").mkdir()
    state = make_state()
    torch.save(state, folder / "released" / "pytorch_model.bin")
    (folder / "released" / "config.json").write_text(json.dumps(CONFIG))
    torch.save(state, folder / "bare.bin")
    torch.save({"a": torch.ones(2), "b": CodeOnUnpickle(folder / "it-ran")}, folder / "trap.bin")
    (folder / "torn.bin").write_bytes((folder / "bare.bin").read_bytes()[:9000])
    torch.save([1], folder / "list.bin")
    del state["sequential.6.norm.weight"]
    torch.save(state, folder / "short.bin")
    (folder / "pieces").mkdir()
    (folder / "pieces" / "mp_rank_00_model_states.pt").write_bytes(b"")
    GPT2Config().save_pretrained(folder / "gpt2")
    byte_tokenizer().save_pretrained(folder / "bytes")
    config = tokenformer.TokenformerConfig(
        vocab_size=61, hidden_size=32, num_hidden_layers=2, num_attention_heads=4
    )
    model = tokenformer.TokenformerForCausalLM(config)
    tensors = {n: t for n, t in model.state_dict().items() if "layers.0.ffn.key" not in n}
    model.save_pretrained(folder / "ours")
    model.save_pretrained(folder / "damaged", state_dict=tensors)
    config.save_pretrained(folder / "empty")
    model.save_pretrained(folder / "cut")
    weights = folder / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    return folder


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("released", "--out is missing"),
        ("released --out released", "--out released already exists"),
        ("released --to neox --out new", "--to neox is unknown; choose released or tokenformer"),
        ("released --to released --out new", "does not apply to a source of kind released"),
        ("released --num_attention_heads 8 --out new", "but config.json has 4"),
        ("released --weights last --out new", "--weights last does not apply to a source of kind"),
        ("bare.bin --out new", "give --num_attention_heads"),
        ("bare.bin --num_attention_heads 5 --out new", "must be a multiple of num_attention_he"),
        ("bare.bin --num_attention_heads 64 --out new", "it must be an even number"),
        ("released --tokenizer absent.json --out new", "absent.json"),
        ("released --tokenizer released/config.json --out new", "is not a tokenizer.json"),
        ("released --tokenizer bytes --out new", "bytes has 257 ids, the model a vocabulary of 61"),
        ("absent.bin --out new", "absent.bin does not exist"),
        ("./absent --out new", "./absent does not exist"),
        ("trap.bin --out new", "trap.bin is refused: it contains posix.symlink"),
        ("torn.bin --out new", "torn.bin is truncated or not a checkpoint"),
        ("list.bin --out new", "list.bin holds a list, not a state dict"),
        ("short.bin --out new", "short.bin: missing: sequential.6.norm.weight"),
        ("pieces --out new", "python -m deepspeed.utils.zero_to_fp32"),
        ("gpt2 --to released --out new", "--to released does not apply to a source of kind gpt2"),
        ("ours --out new", "--to tokenformer does not apply to a source of kind tokenformer"),
        (
            "damaged --to released --out new",
            "damaged cannot be loaded: missing model.layers.0.ffn.key_tokens",
        ),
        ("cut --to released --out new", "cut cannot be loaded: model.safetensors is damaged"),
        ("empty --to released --out new", "model.safetensors is missing"),
    ],
)
def test_refusals_are_one_line_and_leave_nothing(misfits, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(misfits)
    before = sorted(path.name for path in misfits.iterdir())
    with pytest.raises(SystemExit) as end:
        run(f"convert {arguments}")
    error = capsys.readouterr().err
    assert end.value.code == 2
    assert error.count("\n") == 1
    assert message in error
    assert sorted(path.name for path in misfits.iterdir()) == before


@pytest.mark.slow
def test_a_name_of_the_hub_is_taken_from_its_cache(home):
    """As on a machine where it was downloaded once; without a network and a copy, one line."""
    cached = home / "hub" / "models--Haiyang-W--TokenFormer-150M"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("0123abcd")
    (cached / "snapshots").mkdir()
    byte_tokenizer().save_pretrained("released")
    torch.save(make_state(vocabulary=VOCAB_SIZE), home / "released" / "pytorch_model.bin")
    (home / "released").rename(cached / "snapshots" / "0123abcd")
    environment = {**os.environ, "HF_HUB_CACHE": str(home / "hub"), "HF_HUB_OFFLINE": "1"}
    code = (
        "from tokenformer.cli import main\n"
        "main(['convert', 'Haiyang-W/TokenFormer-150M', '--out', 'ours'])\n"
        "main(['convert', 'Haiyang-W/TokenFormer-900M', '--out', 'none'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 2
    assert "Saved to ours" in done.stdout
    assert AutoTokenizer.from_pretrained("ours")("a").input_ids == [97]
    assert done.stderr == (
        "tokenformer convert: Haiyang-W/TokenFormer-900M is neither a file or folder here nor a "
        "model on the hub (offline mode is on, and it is not in the cache)\n"
    )
    assert not (home / "none").exists()


CONVERT_LARGE = """
from tokenformer.cli import main
main("convert released --out ours".split())
print("imported", flush=True)
main("convert large --out there".split())
main("convert there --to released --out back".split())
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
def test_tensors_go_from_file_to_file_without_a_copy_in_memory(home):
    large = make_state(vocabulary=20_000, width=1024)
    (home / "large").mkdir()
    torch.save(large, "large/pytorch_model.bin")
    (home / "large" / "config.json").write_text('{"num_attention_heads": 16}')
    command = [sys.executable, "-c", CONVERT_LARGE]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line == "imported\n":
                break
        first = most = own_memory(process.pid)
        while process.poll() is None:
            most = max(most, own_memory(process.pid))
            time.sleep(0.002)
    assert process.returncode == 0
    size = (home / "large" / "pytorch_model.bin").stat().st_size
    assert size > 80e6
    assert most - first < size / 4
    again = torch.load("back/pytorch_model.bin", weights_only=True)
    assert all(torch.equal(large[name], again[name]) for name in large)


def own_memory(process: int) -> int:
    """Bytes of a process that are not mapped from files, which the system can take back."""
    status = Path(f"/proc/{process}/status").read_text()
    found = re.search(r"RssAnon:\s+(\d+) kB", status)  # absent once it has ended
    return int(found[1]) << 10 if found else 0
