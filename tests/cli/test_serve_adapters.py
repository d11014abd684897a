"""`tokenformer serve` with adapters, with OpenAI's own client: an answer is that of its adapter
alone, whatever else is in its batch."""

import json
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import openai
import pytest

from tests.support.serving import LIMIT, serving
from tokenformer.cli import main

pytest.importorskip("peft", reason="peft is not installed")

NAMES = ("a", "b.1", "own")
PROMPTS = ("naïve — or", "")


@pytest.fixture(scope="module")
def adapters(parrot, tmp_path_factory):
    """Folders of adapters of the parrot."""
    from tests.support.adapters import make_adapter
    from tokenformer import TokenformerForCausalLM

    root = tmp_path_factory.mktemp("adapters")
    options = [{}, {"num_tokens": 3, "targets": ["ffn", "v"]}, {"norm": "own"}]
    for seed, name in enumerate(NAMES):
        base = TokenformerForCausalLM.from_pretrained(parrot)
        make_adapter(base, root / name, seed=seed, std=1.5, **options[seed])
    shutil.copytree(root / "a", root / "a-run" / "adapter")
    return root


@pytest.fixture(scope="module")
def server(parrot, adapters):
    options = [word for name in NAMES for word in ("--adapter", f"{name}={adapters / name}")]
    options += ["--allow_adapter_changes", str(adapters), "--name", "base", "--max_batch", "6"]
    with serving(parrot, *options) as server:
        server.defaults |= {"model": "base", "max_tokens": 30}
        yield server
        stream = server.complete(prompt="a", model="own", max_tokens=100, stream=True)
        next(iter(stream))
        assert server.end(by=signal.SIGTERM) == 0
        assert not [line for line in server.log if "Traceback" in line]


def generated(parrot, folder, prompt, capsys):
    """What `tokenformer generate` adds to a prompt."""
    options = [] if folder is None else ["--adapter", str(folder)]
    words = ["--prompt", prompt, "--greedy", "--max_new_tokens", "30", "--json"]
    main(["generate", str(parrot), *words, *options])
    return json.loads(capsys.readouterr().out)[0]["added"]


def test_the_model_of_a_request_chooses_the_adapter(server, parrot, adapters, capsys):
    found = {}
    for name in ("base", *NAMES):
        answer = server.complete(prompt="Say", model=name)
        assert answer.model == name
        folder = None if name == "base" else adapters / name
        found[name] = answer.choices[0].text
        assert found[name] == generated(parrot, folder, "Say", capsys)
    assert len(set(found.values())) == 4
    listed = server.client.models.list().data
    assert [model.id for model in listed] == ["base", *NAMES]
    assert [getattr(model, "parent", None) for model in listed] == [None, *["base"] * 3]
    with pytest.raises(openai.NotFoundError) as refused:
        server.complete(prompt="Say", model="gpt2")
    assert "no model gpt2; this server has base, a, b.1, own" in str(refused.value)


def test_concurrent_requests_to_all_of_them(server):
    """Greedy and seeded, streamed and whole, with stop sequences and other lengths."""
    settings = ({}, {"temperature": 1.5, "seed": 3}, {"stop": ["a", "\0"], "max_tokens": 9})
    requests = list(enumerate(product(("base", *NAMES), PROMPTS, settings)))

    def ask(request):
        number, (name, prompt, options) = request
        stream = number % 2 == 0
        answer = server.complete(model=name, prompt=prompt, stream=stream, **options)
        if not stream:
            return answer.choices[0].text, answer.choices[0].finish_reason, answer.usage
        events = list(answer)
        text = "".join(event.choices[0].text for event in events)
        return text, events[-1].choices[0].finish_reason, events[-1].usage

    alone = [ask(request) for request in requests]
    assert len({text for text, _, _ in alone}) > len(requests) // 3
    with ThreadPoolExecutor(12) as clients:
        assert list(clients.map(ask, requests)) == alone


def call(server, method, path="", **body):
    request = Request(
        f"{server.url}/adapters{path}",
        json.dumps(body).encode() if body else None,
        {"Content-Type": "application/json"},
        method=method,
    )
    try:
        answer = urlopen(request, timeout=LIMIT)
    except HTTPError as error:
        answer = error
    return answer.status, json.loads(answer.read() or "{}")


def test_clients_change_the_adapters(server, adapters, tmp_path):
    root, secret = adapters, tmp_path / "secret"
    shutil.copytree(root / "own", secret)
    (root / "link").symlink_to(secret)
    for name in ("linked", "broken"):
        shutil.copytree(root / "b.1", root / name)
    weights = root / "linked" / "adapter_model.safetensors"
    weights.unlink()
    weights.symlink_to(secret / weights.name)
    (root / "broken" / weights.name).write_bytes(b"no")

    loaded = call(server, "POST", name="new/a", folder="a-run")
    assert loaded[1]["parent"] == "base"
    found = server.complete(prompt="Say", model="new/a")
    assert found.model == "new/a"
    assert found.choices[0].text == server.complete(prompt="Say", model="a").choices[0].text
    for folder in ("../secret", str(secret), "link", "linked", "none", "\0", "a" * 5000, "", ".."):
        status, answer = call(server, "POST", name="x", folder=folder)
        assert (status, "no adapter folder" in answer["error"]["message"]) == (400, True)
    for body, code, why in [
        ({"name": "new/a", "folder": "a"}, 409, "already"),
        ({"name": "base", "folder": "a"}, 409, "already"),
        ({"name": "a b", "folder": "a"}, 400, "the name"),
        ({"name": "x"}, 400, "folder"),
        ({"name": "x", "folder": "a", "more": 1}, 400, "more=1"),
        ({"name": "x", "folder": "broken"}, 400, "damaged"),
    ]:
        status, answer = call(server, "POST", **body)
        assert status == code
        assert why in answer["error"]["message"]
        assert str(root) not in answer["error"]["message"]
    assert call(server, "DELETE", "/base")[0] == 400
    assert call(server, "DELETE", "/x")[0] == 404
    deleted = {"id": "new/a", "object": "model", "deleted": True}
    assert call(server, "DELETE", "/new/a") == (200, deleted)
    with pytest.raises(openai.NotFoundError):
        server.complete(prompt="Say", model="new/a")
    assert [model.id for model in server.client.models.list()] == ["base", *NAMES]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["a={root}/a", "a={root}/own"], "two named a"),
        (["{root}/a", "x={root}/own", "{root}/a"], "two named a"),
        (["MODEL={root}/a"], "the model itself has the name MODEL"),
        (["a={root}/none"], "does not exist"),
        (["{root}"], "not an adapter"),
        (["a b={root}/a"], "the name 'a b'"),
        (["{root}/a/adapter_config.json"], "is a file"),
    ],
)
def test_bad_options_are_one_line(parrot, adapters, options, named, capsys):
    words = [word.format(root=adapters) for word in options]
    with pytest.raises(SystemExit) as end:
        main(["serve", str(parrot), "--name", "MODEL", "--port", "0", "--adapter", *words])
    captured = capsys.readouterr()
    assert end.value.code == 2
    assert captured.err.count("\n") == 1
    assert named in captured.err


def test_the_folder_for_changes_must_exist(parrot, tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        main(["serve", str(parrot), "--allow_adapter_changes", str(tmp_path / "no")])
    assert end.value.code == 2
    assert "is not a folder" in capsys.readouterr().err
