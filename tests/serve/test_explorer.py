"""The server behind the live page: what it answers, to whom, and what it refuses."""

import http.client
import json
import threading

import pytest
import torch

import tokenformer
from tests.support.growth import trained_tokenformer
from tokenformer.cli import main
from tokenformer.cli.serve import bind
from tokenformer.data.byte_tokenizer import VOCAB_SIZE, byte_tokenizer
from tokenformer.errors import InputError
from tokenformer.interpret import Vocabulary, direct_effects, intervene, score_maps
from tokenformer.serve.explorer import MAX_BODY, Explorer, RequestError

JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    home = tmp_path_factory.mktemp("explorer")
    torch.manual_seed(0)
    config = tokenformer.TokenformerConfig(
        vocab_size=VOCAB_SIZE, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        qkv_tokens=8, output_tokens=8, ffn_tokens=16, max_position_embeddings=64,
    )  # fmt: skip
    model = tokenformer.TokenformerForCausalLM(config)
    model.save_pretrained(home / "tiny")
    byte_tokenizer().save_pretrained(home / "tiny")
    (home / "text.txt").write_text("A text about a fox.\n" * 60)
    (home / "secret.js").write_text("secret")
    main(["prepare", str(home / "text.txt"), "--out", str(home / "data")])
    words = ["--data", str(home / "data"), "--split", "train", "--length", "32"]
    main(["explore", str(home / "tiny"), *words, "--out", str(home / "site")])
    (home / "site" / "data" / "link.js").symlink_to(home / "secret.js")
    return home / "site"


@pytest.fixture(scope="module")
def explorer(site):
    model = tokenformer.TokenformerForCausalLM.from_pretrained(site.parent / "tiny").eval()
    return Explorer(model, Vocabulary(byte_tokenizer()), site)


@pytest.fixture(scope="module")
def port(explorer):
    listener = bind("127.0.0.1", 0)
    threading.Thread(target=explorer.run, args=(listener,), daemon=True).start()
    return listener.getsockname()[1]


@pytest.fixture
def ask(port):
    """ask(method, path, body, headers) -> status, headers, body."""

    def send(method, path, body=None, headers=None):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        try:
            connection.request(method, path, body, headers or {})
            answer = connection.getresponse()
            return answer.status, answer.headers, answer.read()
        finally:
            connection.close()

    return send


def test_files_of_the_site_and_no_others(ask, site):
    status, headers, body = ask("GET", "/")
    assert (status, body) == (200, (site / "index.html").read_bytes())
    assert headers["Content-Type"].startswith("text/html")
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    for path in ("/app.js", "/data/site.js", "/style.css", "/icon.svg"):
        assert ask("GET", path)[2] == (site / path[1:]).read_bytes()
    status, _, body = ask("GET", "/data/live.js")
    assert json.loads(body[len('TF.take("live",') : -2])["longest"] == 4 * 64
    for path in (
        "/../secret.js", "/data/../../secret.js", "/%2e%2e/secret.js", "//secret.js",
        "/data/link.js", "/index/index.safetensors", "/data", "/none.js",
    ):  # fmt: skip
        assert ask("GET", path)[0] == 404, path


def test_an_answer_is_that_of_the_model(ask, explorer):
    text, off = "A text about", ["0.ffn.3"]
    status, _, body = ask("POST", "/api/run", json.dumps({"text": text, "off": off}), JSON)
    assert status == 200
    answer = json.loads(body)
    assert "".join(answer["texts"]) == text
    ids = torch.tensor([list(text.encode())])
    model = explorer.model
    with torch.no_grad():
        loss = model(input_ids=ids, labels=ids).loss.item()
        with intervene(model, off=off):
            changed = model(input_ids=ids, labels=ids).loss.item()
            maps = score_maps(model, ids)
            likely = model(input_ids=ids).logits.argmax(-1)
            effects = direct_effects(model, maps, likely)
    weights = maps["0.ffn"].weights[0, 4]
    assert [run["loss"] for run in answer["runs"]] == pytest.approx([loss, changed], abs=1e-5)
    rows = [row for row in answer["positions"][4] if row[0] == "0.ffn"]
    for _, number, weight, _ in rows:
        assert weight == pytest.approx(weights[number].item(), rel=0.01, abs=1e-3)
    best = max(effect[0, 4].max().item() for effect in effects.values())
    layer, number, effect = answer["effects"][4][0]
    assert effect == pytest.approx(best, rel=0.01)
    assert effects[layer][0, 4, number].item() == pytest.approx(best, rel=0.01)


@pytest.mark.parametrize(
    ("path", "body", "headers", "status", "message"),
    [
        ("/api/run", "{", JSON, 400, "not JSON"),
        ("/api/run", "[" * 99_999, JSON, 400, "not JSON"),
        ("/api/run", "{}", JSON, 400, "send {text: a text"),
        ("/api/run", '{"text": ""}', JSON, 400, "send {text: a text"),
        ("/api/run", '{"text": "a", "off": "0.q.1"}', JSON, 400, "send {text: a text"),
        ("/api/run", '{"text": "a", "off": ["0.q.9"]}', JSON, 400, "0.q has 8 tokens"),
        ("/api/run", '{"text": "a", "off": ["x"]}', JSON, 400, "is not a token"),
        ("/api/run", json.dumps({"text": "a" * 65}), JSON, 400, "65 tokens; at most 64"),
        ("/api/run", '{"text": "a\\ud800b"}', JSON, 400, "half a character"),
        ("/api/run", '{"text": "a"}', {"Content-Type": "text/plain"}, 415, "application/json"),
        (
            "/api/run",
            '{"text": "a"}',
            {**JSON, "Origin": "http://evil"},
            403,
            "other sites",
        ),
        ("/api/run", '{"text": "a"}', {**JSON, "Origin": "null"}, 403, "other sites"),
        ("/api/run", '{"text": "a"}', {**JSON, "Host": "evil.example"}, 403, "not allowed"),
        ("/api/run", " " * (MAX_BODY + 1), JSON, 413, "at most"),
        ("/api/other", '{"text": "a"}', JSON, 404, "no such page"),
    ],
)
def test_refused_requests(ask, path, body, headers, status, message):
    found, answered, text = ask("POST", path, body, headers)
    assert found == status
    assert message in json.loads(text)["error"]
    assert answered["X-Content-Type-Options"] == "nosniff"


def test_a_rebound_name_cannot_even_read(ask):
    assert ask("GET", "/", headers={"Host": "evil.example:80"})[0] == 403
    assert ask("GET", "/", headers={"Host": "localhost:1"})[0] == 200


def test_one_character_has_no_loss_but_a_continuation(explorer):
    (run,) = explorer.answer({"text": "A"})["runs"]
    assert run["loss"] is None
    assert run["continuation"]


def test_a_text_must_fit_the_earlier_model_too(explorer, site, make_config):
    options = {"vocab_size": VOCAB_SIZE, "positions": "learned", "max_position_embeddings": 16}
    earlier = tokenformer.TokenformerForCausalLM(make_config("tokenformer", **options)).eval()
    both = Explorer(explorer.model, explorer.vocabulary, site, earlier)
    assert len(both.answer({"text": "a" * 16})["runs"]) == 2
    assert json.loads(both.live_piece()[len('TF.take("live",') : -2])["longest"] == 4 * 16
    with pytest.raises(RequestError, match="17 tokens; at most 16"):
        both.answer({"text": "a" * 17})


def test_an_unexpected_error_is_answered(ask, explorer, monkeypatch):
    def fail(*args, **options):
        raise IndexError("out of\nrange")

    monkeypatch.setattr(explorer.model, "generate", fail)
    status, headers, body = ask("POST", "/api/run", '{"text": "abc"}', JSON)
    assert status == 500
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert json.loads(body) == {"error": "the server failed: IndexError: out of"}
    monkeypatch.undo()
    assert ask("POST", "/api/run", '{"text": "abc"}', JSON)[0] == 200


def test_models_that_cannot_be_compared_are_refused(explorer, site, make_config):
    other = tokenformer.TokenformerForCausalLM(make_config("tokenformer"))
    with pytest.raises(InputError, match="a vocabulary of 61, the model one of 257"):
        Explorer(explorer.model, explorer.vocabulary, site, other)


def test_a_page_of_another_model_is_not_served(site, make_config, tmp_path, capsys):
    model, _ = trained_tokenformer(make_config, vocab_size=VOCAB_SIZE)
    model.save_pretrained(tmp_path / "other")
    byte_tokenizer().save_pretrained(tmp_path / "other")
    with pytest.raises(SystemExit):
        main(["explore", str(tmp_path / "other"), "--serve", "--port", "0", "--out", str(site)])
    assert "is the page of another model" in capsys.readouterr().err
