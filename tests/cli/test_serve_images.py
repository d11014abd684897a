"""`tokenformer serve` with a vision-language model, as a process, with OpenAI's own client."""

import base64
import io
import json
import signal
import struct
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from PIL import Image

from tests.support.commands import error_line
from tests.support.image_text import make_joint, make_processor, pictures, train_new_tokens
from tests.support.serving import Server, serving
from tokenformer.cli import main

QUESTION = "What is it?"
MAX_PIXELS = 10_000


@pytest.fixture(scope="module")
def joint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("joint") / "model"
    model = train_new_tokens(make_joint("routed", torch.float32))
    model.save_pretrained(folder)
    make_processor(model).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def server(joint: Path) -> Iterator[Server]:
    limits = ["--max_images", "3", "--max_image_pixels", str(MAX_PIXELS), "--max_body", "100000"]
    with serving(joint, *limits) as server:
        server.defaults["max_tokens"] = 12
        yield server
        assert server.end(by=signal.SIGTERM) == 0
        assert not [line for line in server.log if "Traceback" in line]


def data_url(image: Image.Image | bytes, kind: str = "PNG") -> str:
    content = image
    if not isinstance(content, bytes):
        file = io.BytesIO()
        content.save(file, kind)
        content = file.getvalue()
    return f"data:image/{kind.lower()};base64,{base64.b64encode(content).decode()}"


def image_part(url: str, **options: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **options}}


def message(*parts: str | Image.Image, role: str = "user") -> dict[str, Any]:
    content = [
        {"type": "text", "text": part} if isinstance(part, str) else image_part(data_url(part))
        for part in parts
    ]
    return {"role": role, "content": content}


def ask(server: Server, *messages: Any, **options: Any) -> Any:
    request = {**server.defaults, "messages": list(messages), **options}
    return server.client.chat.completions.create(**request)


def generated(capsys: Any, *arguments: Any) -> str:
    """What `tokenformer generate` adds to a prompt."""
    capsys.readouterr()
    main(["generate", *map(str, arguments), "--greedy", "--max_new_tokens", "12", "--json"])
    [found] = json.loads(capsys.readouterr().out)
    return str(found["added"])


def test_an_answer_is_what_generate_says(
    server: Server, joint: Path, tmp_path: Path, capsys: Any
) -> None:
    answers = []
    for number, picture in enumerate(pictures(2)):
        picture.save(file := tmp_path / f"{number}.png")
        found = ask(server, message(picture, QUESTION))
        prompt = f"user: <image>{QUESTION}\nassistant: "
        added = generated(capsys, joint, "--image", file, "--prompt", prompt)
        answers.append(found.choices[0].message.content)
        assert answers[-1] == added
        placeholders = 5 + 1 - len("<image>")
        assert found.usage.prompt_tokens == len(prompt) + placeholders
    assert answers[0] != answers[1]  # it sees


def test_the_place_and_number_of_images_count(server: Server, joint: Path) -> None:
    """Several images, anywhere in several turns; as the model continues the chat template."""
    first, second, third = pictures(3)
    chat = [
        message("Between ", first, " and ", second, "?"),
        {"role": "assistant", "content": "A dog."},
        message("And ", third),
    ]
    model = train_new_tokens(make_joint("routed", torch.float32))
    processor = make_processor(model)
    text = "user: Between <image> and <image>?\nassistant: A dog.<|endoftext|>user: And <image>\n"
    batch = processor(text=f"{text}assistant: ", images=[first, second, third], return_tensors="pt")
    ids = model.generate(**batch, max_new_tokens=12, do_sample=False)[
        0, batch["input_ids"].size(1) :
    ]
    found = ask(server, *chat)
    wanted = processor.tokenizer.decode(ids, skip_special_tokens=True)
    assert found.choices[0].message.content == wanted
    assert found.usage.prompt_tokens == batch["input_ids"].shape[1]


@pytest.mark.parametrize("options", [{}, {"temperature": 1, "seed": 3}], ids=str)
def test_streaming_gives_the_same_text(server: Server, options: dict[str, Any]) -> None:
    chat = message(pictures(1)[0], QUESTION)
    whole = ask(server, chat, **options)
    events = list(ask(server, chat, stream=True, **options))
    pieces = [event.choices[0].delta.content or "" for event in events]
    assert "".join(pieces) == whole.choices[0].message.content
    assert events[-1].usage == whole.usage
    assert events[-1].choices[0].finish_reason == whole.choices[0].finish_reason


def test_requests_with_and_without_images_share_the_server(
    server: Server, joint: Path, capsys: Any
) -> None:
    chats = [
        message(QUESTION),
        *[message(picture, QUESTION) for picture in pictures(2)],
        message(*pictures(2, seed=4), "both"),
        {"role": "user", "content": "plain text"},
    ]

    def answer(number: int) -> str:
        options = {"temperature": 1, "seed": number} if number % 2 else {}
        return str(ask(server, chats[number % 5], **options).choices[0].message.content)

    alone = [answer(number) for number in range(10)]
    with ThreadPoolExecutor(10) as clients:
        assert list(clients.map(answer, range(10))) == alone
    assert alone[0] == generated(capsys, joint, "--prompt", f"user: {QUESTION}\nassistant: ")
    completed = server.complete(prompt="Once").choices[0].text
    assert completed == generated(capsys, joint, "--prompt", "Once")


@pytest.mark.parametrize("kind", ["JPEG", "WEBP", "GIF"])
def test_formats(server: Server, kind: str) -> None:
    url = data_url(pictures(1)[0], kind)
    chat = {"role": "user", "content": [image_part(url, detail="auto")]}
    assert ask(server, chat).usage.completion_tokens


def bomb() -> bytes:
    """A PNG of a terabyte in a hundred bytes."""
    header = struct.pack(">IIBBBBB", 2**20, 2**19, 8, 2, 0, 0, 0)
    parts = [(b"IHDR", header), (b"IDAT", zlib.compress(bytes(64))), (b"IEND", b"")]
    chunks = [
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in parts
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


@pytest.mark.parametrize(
    ("url", "named"),
    [
        ("http://127.0.0.1:9/dog.png", "this server fetches no URLs and reads no files"),
        ("https://images.example/" + "x" * 200, "fetches no URLs"),
        ("file:///etc/passwd", "fetches no URLs"),
        ("/etc/passwd", "fetches no URLs"),
        ("", "'' is not a data URL of an image"),
        ("data:text/plain;base64,aGVsbG8=", "is not a data URL of an image"),
        ("data:image/png,raw", "is not a data URL of an image"),
        ("data:image/png;base64,not base64!", "the data URL is not base64"),
        ("data:image/png;base64,", "cannot be read as an image"),
        (data_url(b"no image"), "it is none of PNG, JPEG, WEBP, GIF"),
        (data_url(Image.new("RGB", (8, 8)), "BMP"), "it is none of PNG, JPEG, WEBP, GIF"),
        (data_url(pictures(1)[0])[:-200], "cannot be read as an image"),
        (data_url(bomb()), "cannot be read as an image"),
        (data_url(Image.new("RGB", (101, 100))), "more than --max_image_pixels 10000"),
    ],
    ids=lambda value: value[:40],
)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_what_is_no_image_is_refused(server: Server, url: str, named: str, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        ask(server, {"role": "user", "content": [image_part(url)]}, stream=stream)
    line = refused.value.body["message"]
    assert named in line
    assert line.startswith("messages.0.content.0")
    assert "\n" not in line
    assert len(line) < 300


@pytest.mark.parametrize(
    ("chat", "kind", "named"),
    [
        (message(*pictures(1) * 4), openai.BadRequestError, "4 images, more than --max_images 3"),
        (message("an <image>"), openai.BadRequestError, "1 times <image> for 0 images"),
        (message("an <image>", *pictures(1)), openai.BadRequestError, "2 times <image> for 1"),
        (message(*pictures(1), role="assistant"), openai.BadRequestError, "0 times <image> for 1"),
        (message("x" * 300, *pictures(1)), openai.BadRequestError, "the model's context 256"),
        (message(Image.effect_noise((300, 300), 90)), openai.APIStatusError, "--max_body 100000"),
        (
            {"role": "user", "content": [image_part(data_url(pictures(1)[0]), detail="high")]},
            openai.BadRequestError,
            "image_url.detail: input should be 'auto'",
        ),
        (
            {"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]},
            openai.BadRequestError,
            "input_audio",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_messages_that_cannot_be_answered_are_refused(
    server: Server, chat: Any, kind: Any, named: str
) -> None:
    with pytest.raises(kind) as refused:
        ask(server, chat)
    assert named in refused.value.body["message"]
    assert "\n" not in refused.value.body["message"]


def test_a_completion_has_no_images(server: Server) -> None:
    with pytest.raises(openai.BadRequestError, match="send images to /v1/chat/completions"):
        server.complete(prompt="<image>a")


def test_options_for_language_models_are_refused(joint: Path, tmp_path: Path, capsys: Any) -> None:
    for command in (["serve", joint, "--port", "0"], ["generate", joint, "--prompt", "a"]):
        line = error_line([*command, "--bits", 8], capsys)
        assert "--bits is for language models, not for a vision-language model" in line
    folder = ["--allow_adapter_changes", tmp_path]
    line = error_line(["serve", joint, *folder], capsys)
    assert "--allow_adapter_changes is for language models" in line
    line = error_line(["generate", joint, "--prompt", "<image>a"], capsys)
    assert "the prompt has <image>; name the image with --image" in line
    assert "--max_images -1" in error_line(["serve", joint, "--max_images", -1], capsys)
    assert "--max_image_pixels 0" in error_line(["serve", joint, "--max_image_pixels", 0], capsys)
