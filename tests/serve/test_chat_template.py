"""A chat template is rendered in a process that can be ended."""

import threading
import time

import pytest

from tests.support.processes import wait_until
from tests.support.serving import CHAT_TEMPLATE
from tokenformer.data.byte_tokenizer import byte_tokenizer
from tokenformer.serve.chat_template import ChatTemplate
from tokenformer.serve.prompt import PromptError

LIMIT = 90


def chat(text):
    return [{"role": "user", "content": text}]


@pytest.fixture(scope="module")
def template():
    template = ChatTemplate(CHAT_TEMPLATE, {"eos_token": "<end>"}, 5.0, max_characters=100_000)
    yield template
    template.kill()
    template.reap()


def test_it_renders_what_transformers_renders(template):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template, tokenizer.eos_token = CHAT_TEMPLATE, "<end>"
    messages = [*chat("Hi 日本語 🙂"), {"role": "assistant", "content": "\n\u2028 {{ 1 }}"}]
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert template.render(messages) == expected


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("loop", "did not finish within 5 seconds"),
        ("power", "did not finish within 5 seconds"),
        ("memory", "MemoryError"),
        ("long", "it renders 400.* characters, more than 100000"),
        ("sum", "unsupported operand"),
    ],
)
def test_a_template_that_takes_too_much_is_ended(template, text, named):
    with pytest.raises(PromptError, match=named):
        template.render(chat(text))
    assert template.render(chat("Hi")).startswith("[user] Hi")  # and the next one renders


def test_a_child_that_died_is_not_reported_as_a_timeout():
    template = ChatTemplate(CHAT_TEMPLATE, {}, 10 * LIMIT, max_characters=1000)
    child = template.start()
    threading.Timer(0.5, child.kill).start()  # as the kernel does when memory runs out
    with pytest.raises(PromptError, match=r"ended with exit code -9, .* memory ran out"):
        template.render(chat("loop"))
    template.kill()
    template.reap()


def test_rendering_can_be_ended_from_another_thread():
    template = ChatTemplate(CHAT_TEMPLATE, {}, 10 * LIMIT, max_characters=1000)
    template.start()
    errors = []

    def render():
        with pytest.raises(PromptError) as error:
            template.render(chat("loop"))
        errors.append(error)

    thread = threading.Thread(target=render, daemon=True)
    thread.start()
    time.sleep(0.5)
    template.kill()
    thread.join(LIMIT)
    assert errors


def test_the_child_ends_when_its_parent_is_gone(template):
    template.render(chat("Hi"))
    child = template.child
    child.stdin.close()
    wait_until(lambda: child.poll() is not None)
    assert child.returncode == 0
    assert template.render(chat("Hi"))
