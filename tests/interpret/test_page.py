"""The page in a real Chromium: from disk, and with a live model behind it."""

import json
import math
import re
import shutil
import threading
from pathlib import Path

import pytest
import torch

import tokenformer
from tests.support.browser import Page, browser
from tests.support.growth import train_on_text
from tokenformer.cli import main
from tokenformer.cli.serve import bind
from tokenformer.data.byte_tokenizer import VOCAB_SIZE, byte_tokenizer
from tokenformer.interpret import TokenIndex, Vocabulary, continue_text, intervene
from tokenformer.models.image_processing import TokenformerImageProcessor
from tokenformer.serve.explorer import Explorer

TEXT = "The [[quick]] brown fox & a <b>lazy</b> [[dog]] naïvely cost 5 €.\n" * 120
MANY = 34_480
UP, DOWN, RIGHT = "\ue013", "\ue015", "\ue014"
HOME, END, ENTER = "\ue011", "\ue010", "\ue007"
"""Keys, as WebDriver encodes them."""
MINUS = "\N{MINUS SIGN}"
STATUS = "document.querySelector('[role=status]').textContent"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with a trained and grown model `grown`, the corpus `data` and the page `site`."""
    home = tmp_path_factory.mktemp("explore")
    torch.manual_seed(0)
    config = tokenformer.TokenformerConfig(
        vocab_size=VOCAB_SIZE, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        qkv_tokens=16, output_tokens=16, ffn_tokens=48, max_position_embeddings=128,
        bos_token_id=256, eos_token_id=256,
    )  # fmt: skip
    model = tokenformer.TokenformerForCausalLM(config)
    train_on_text(model, torch.tensor([*TEXT.encode()]), 30, rate=1e-2)
    model.save_pretrained(home / "small")
    grown, _ = tokenformer.grow(model, ffn_tokens=200)
    train_on_text(grown, torch.tensor([*TEXT.encode()]), 10, rate=1e-2)
    grown.save_pretrained(home / "grown")
    byte_tokenizer().save_pretrained(home / "grown")
    (home / "text.txt").write_text(TEXT)
    main(["prepare", str(home / "text.txt"), "--out", str(home / "data")])
    words = ["--data", str(home / "data"), "--split", "train", "--sequences", "40"]
    words += ["--length", "64", "--examples", "2", "--out", str(home / "site")]
    main(["explore", str(home / "grown"), *words])
    return home


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    with browser(tmp_path_factory.mktemp("browser")) as driver:
        yield Page(driver)


@pytest.fixture
def page(chromium, folder):
    chromium.resize(1280)
    chromium.errors()
    yield chromium
    assert chromium.errors() == []


def from_disk(folder: Path) -> str:
    return f"file://{folder / 'site' / 'index.html'}"


def test_search_sort_and_open_a_token_from_disk(page, folder):
    index = TokenIndex.load(folder / "site" / "index")
    page.open(from_disk(folder))
    assert page.find("h1").text == "What every token does"
    assert len(page.all(".layers td a")) == 10
    assert len(page.all(".clearest a")) > 0
    page.find("[data-tab=tokens]").click()
    total = sum(map(len, index.layers.values()))
    page.wait(f"{STATUS} === arguments[0]", f"{total} tokens")
    assert len(page.all(".row")) < 60, "only the rows in view are drawn"
    search = page.find("#search")
    search.send_keys("[[QUICK")
    page.wait(f"!{STATUS}.startsWith(arguments[0])", str(total))
    found = page.run(
        "return [...document.querySelectorAll('.row .snippet')].map((e) => e.textContent)"
    )
    assert found
    assert all("[[quick" in text.replace("␣", " ") for text in found)
    page.find("[data-key=largest]").click()
    page.wait("document.querySelector('[data-key=largest]').dataset.direction === 'down'")
    peaks = [float(text) for text in page.texts(".row .largest span:not(.label)")]
    assert peaks == sorted(peaks, reverse=True)
    page.find("[data-key=largest]").click()
    page.wait("document.querySelector('[data-key=largest]').dataset.direction === 'up'")
    peaks = [float(text) for text in page.texts(".row .largest span:not(.label)")]
    assert peaks == sorted(peaks)
    search.clear()
    search.send_keys("1.ffn.7\n")
    assert page.wait("document.querySelector('.token h1')?.textContent").startswith("1.ffn.7 ")
    contexts = index.contexts(tokenformer.interpret.Token("1.ffn", 7), Vocabulary(byte_tokenizer()))
    shown = page.texts(".contexts .context")
    assert len(shown) == len(contexts)
    expected = contexts[0].before + contexts[0].fired + contexts[0].after
    assert shown[0].replace("↵", "").split() == expected.split()
    assert page.run("return document.querySelectorAll('.contexts mark.fired').length") == len(shown)
    layer = index.layers["1.ffn"]
    promoted = layer.promoted[7][layer.promoted_by[7] > 0].tolist()
    words = [Vocabulary(byte_tokenizer()).label(n) for n in promoted]
    assert [text.replace("␣", " ") for text in page.texts(".lens.up .chip")] == words
    page.run("history.back()")
    page.find("#search")


def test_old_and_new_tokens_apart(page, folder):
    page.open(from_disk(folder))
    assert len(page.all(".ages tbody tr")) == 2, "the two layers that have grown"
    page.open(f"{from_disk(folder)}#/tokens?layer=0.ffn&age=1")
    page.wait(f"{STATUS} === '152 tokens'")
    page.run(
        """const select = document.querySelector('[aria-label=Age]');
        select.value = '0';
        select.dispatchEvent(new Event('change'))"""
    )
    page.wait(f"{STATUS} === '48 tokens'")
    assert "age=0" in page.run("return location.hash")


def test_the_list_is_worked_by_keys(page, folder):
    page.open(f"{from_disk(folder)}#/tokens?layer=0.ffn&sort=work")
    page.wait("document.querySelectorAll('.row').length > 5")
    index = TokenIndex.load(folder / "site" / "index")
    order = index.layers["0.ffn"].work.argsort(descending=True).tolist()
    rows = page.find(".rows")
    page.run("document.querySelector('.rows').focus()")
    rows.send_keys(DOWN, DOWN)
    assert page.find(".row[aria-selected=true] .name").text == f"0.ffn.{order[1]}"
    rows.send_keys(END)
    page.wait("document.querySelector('.row[aria-selected=true]')?.ariaPosInSet === '200'")
    rows.send_keys(HOME, ENTER)
    assert page.wait("document.querySelector('.token h1')?.textContent").startswith(
        f"0.ffn.{order[0]} "
    )
    page.driver.switch_to.active_element.send_keys(RIGHT)
    page.wait("document.querySelector('.token h1').textContent.startsWith(arguments[0])",
              f"0.ffn.{order[0] + 1} ")  # fmt: skip
    page.driver.switch_to.active_element.send_keys("/")
    page.wait("document.activeElement.id === 'search'")
    page.find("#search").send_keys("0.ffn.1", ENTER)
    page.wait("document.querySelector('.token h1')?.textContent.startsWith('0.ffn.1 ')")


def test_a_search_without_a_match_says_so_and_can_be_left(page, folder):
    page.open(f"{from_disk(folder)}#/tokens?layer=0.ffn&q=nowhere")
    assert "No token matches" in page.find(".none").text
    assert page.all(".row") == []
    page.find(".none button").click()
    page.wait(f"{STATUS} === '200 tokens'")
    search = page.find("#search")
    search.send_keys(DOWN, DOWN)
    page.wait("document.querySelector('.row[aria-selected=true]')?.ariaPosInSet === '2'")
    page.find(".rows").send_keys(UP, UP)
    page.wait("document.activeElement.id === 'search'")


def test_going_back_returns_to_the_same_place(page, folder):
    page.open(f"{from_disk(folder)}#/tokens?layer=0.ffn")
    page.wait("document.querySelectorAll('.row').length > 5")
    page.run("document.querySelector('.rows').scrollTop = 3000")
    page.wait("document.querySelector('.row').ariaPosInSet > 40")
    name = page.texts(".row .name")[8].strip()
    page.all(".row")[8].click()
    page.wait("document.querySelector('.token h1')?.textContent.startsWith(arguments[0])", name)
    page.run("history.back()")
    page.wait("document.querySelector('.rows')?.scrollTop === 3000")
    assert name in [text.strip() for text in page.texts(".row .name")]


def test_walking_through_an_example(page, folder):
    page.open(f"{from_disk(folder)}#/examples/1")
    walk = page.find(".walk")
    example = json.loads(
        re.fullmatch(
            r'TF\.take\("example-1",(.*)\)\n', (folder / "site/data/example-1.js").read_text()
        )[1]
    )
    pieces = page.run("return [...document.querySelectorAll('.piece')].map((e) => e.textContent)")
    assert [piece.replace("↵", "") for piece in pieces] == example["texts"]
    walk.send_keys(HOME, RIGHT, RIGHT)
    assert walk.get_attribute("aria-valuenow") == "3"
    names = page.texts(".detail .alike .name")
    rows = [*example["effects"][2], *example["positions"][2]]
    assert names == [f"{layer}.{n}" for layer, n, *_ in rows]
    page.all(".piece")[5].click()
    assert walk.get_attribute("aria-valuenow") == "6"
    assert len(page.all(".map")) == 12


@pytest.mark.parametrize("width", [360, 1280])
@pytest.mark.parametrize("dark", [False, True])
def test_every_view_fits_has_labels_and_contrast(page, folder, width, dark):
    page.resize(width, 800, dark=dark)
    for view in ("", "tokens", "token/1.ffn/7", "examples/0"):
        page.open(f"{from_disk(folder)}#/{view}")
        page.wait("document.querySelector('main h1') && !document.querySelector('main > .hint')")
        if view == "tokens":
            page.wait("document.querySelectorAll('.row').length > 5")
        assert page.run("return document.documentElement.scrollWidth") <= width, view
        assert page.run(UNNAMED) == [], view
        assert len(page.all("h1")) == 1
        for text, ratio in page.run(CONTRASTS):
            assert ratio >= 4.5, (view, text)


UNNAMED = """
const kinds = 'a, button, input, select, textarea, [tabindex]';
const named = (e) => (e.innerText || '').trim() || e.getAttribute('aria-label');
return [...document.querySelectorAll(kinds)]
  .filter((e) => e.id !== 'main' && e.checkVisibility() && !named(e))
  .map((e) => e.outerHTML.slice(0, 200));
"""
CONTRASTS = """
const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
function rgba(color) {
  canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = color; canvas.fillRect(0, 0, 1, 1);
  return [...canvas.getImageData(0, 0, 1, 1).data];
}
function luminance(c) {
  const linear = (v) => (v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
  const [r, g, b] = c.map((v) => linear(v / 255));
  return .2126 * r + .7152 * g + .0722 * b;
}
function behind(e) {  // the color under the text of an element, from the page up
  const layers = [];
  for (; e; e = e.parentElement) layers.unshift(rgba(getComputedStyle(e).backgroundColor));
  let color = [255, 255, 255];
  for (const [r, g, b, a] of layers) {
    color = [r, g, b].map((v, i) => (v * a + color[i] * (255 - a)) / 255);
  }
  return color;
}
const found = [];
for (const e of document.querySelectorAll('main *, header *')) {
  const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
  const style = getComputedStyle(e);
  if (!own || !e.checkVisibility() || style.backgroundClip === 'text') continue;
  const pair = [luminance(rgba(style.color).slice(0, 3)), luminance(behind(e))];
  const [a, b] = pair.sort((x, y) => y - x);
  found.push([e.textContent.slice(0, 40), (a + .05) / (b + .05)]);
}
return found.sort((a, b) => a[1] - b[1]).slice(0, 5);
"""


def test_a_list_as_long_as_the_largest_model(page, folder, tmp_path):
    """34,480 tokens in a layer: opening, sorting, searching and scrolling to the end."""
    site = shutil.copytree(folder / "site", tmp_path / "site")
    table = site / "data" / "table-1.ffn.js"
    text = table.read_text()
    columns = json.loads(text[text.index(",") + 1 : text.rindex(")")])
    count = len(columns["age"])
    longer = {
        name: (column * (MANY // count + 1))[:MANY] if isinstance(column, list) else column
        for name, column in columns.items()
    }
    table.write_text(f'TF.take("table-1.ffn",{json.dumps(longer)})\n')
    overview = (site / "data" / "site.js").read_text()
    wanted = '"name":"1.ffn","tokens":'
    assert f"{wanted}{count}," in overview
    (site / "data" / "site.js").write_text(
        overview.replace(f"{wanted}{count},", f"{wanted}{MANY},")
    )
    page.open(f"file://{site / 'index.html'}#/tokens?layer=1.ffn")
    page.wait("document.querySelector('[role=status]').textContent === '34,480 tokens'")
    assert len(page.all(".row")) < 60
    page.run("const r = document.querySelector('.rows'); r.scrollTop = r.scrollHeight")
    page.wait("[...document.querySelectorAll('.row')].some((e) => e.ariaPosInSet === '34480')")
    last = page.run(
        """const rows = [...document.querySelectorAll('.row')];
        const row = rows.find((e) => e.ariaPosInSet === '34480');
        const list = document.querySelector('.rows').getBoundingClientRect();
        return row.getBoundingClientRect().bottom - list.bottom"""
    )
    assert abs(last) < 3, "the last row is at the end of the list"
    search = page.find("#search")
    search.send_keys("1.ffn.34479")
    page.wait("document.querySelector('[role=status]').textContent === '1 token'")


def test_the_page_of_a_classifier_shows_patches(page, tmp_path):
    torch.manual_seed(0)
    config = tokenformer.TokenformerVisionConfig(
        image_size=8, patch_size=4, num_channels=1, num_labels=10, hidden_size=16,
        num_hidden_layers=1, num_attention_heads=2, initializer_range=0.3,
    )  # fmt: skip
    tokenformer.TokenformerForImageClassification(config).save_pretrained(tmp_path / "digits")
    TokenformerImageProcessor.for_size(8, 1).save_pretrained(tmp_path / "digits")
    words = ["--images", "digits", "--sequences", "20", "--out", str(tmp_path / "site")]
    main(["explore", str(tmp_path / "digits"), *words])
    address = f"file://{tmp_path / 'site' / 'index.html'}"
    index = TokenIndex.load(tmp_path / "site" / "index")
    page.open(f"{address}#/token/0.ffn/3")
    page.wait("document.querySelectorAll('.contexts canvas').length === 8")
    pixels = page.run(
        """const canvas = document.querySelector('.contexts canvas');
        const {data} = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
        return [...data].filter((_, i) => i % 4 === 0)"""
    )
    layer = index.layers["0.ffn"]
    assert pixels == index.sample(int(layer.top_samples[3, 0])).flatten().tolist()
    fired = page.run(
        """const cells = [...document.querySelector('.contexts .patches').children];
        return cells.findIndex((e) => e.classList.contains('fired'))"""
    )
    assert fired == int(layer.top_positions[3, 0]) - 1, "the class token comes first; it has none"
    page.open(f"{address}#/tokens")
    page.wait("document.querySelectorAll('.row .thumb canvas').length > 5")
    page.open(f"{address}#/examples/0")
    walk = page.find(".walk")
    walk.send_keys(DOWN)
    assert walk.get_attribute("aria-valuetext") == "Patch in row 2, column 2"
    assert "null" not in page.find("main").text


def test_a_page_without_its_data_says_so(chromium, folder, tmp_path):
    site = shutil.copytree(folder / "site", tmp_path / "site")
    (site / "data" / "site.js").unlink()
    chromium.open(f"file://{site / 'index.html'}")
    assert "is the folder complete" in chromium.find("[role=alert]").text
    chromium.errors()


@pytest.fixture(scope="module")
def explorer(folder):
    """The live server of the grown model, and the small one before growth."""
    grown, small = (
        tokenformer.TokenformerForCausalLM.from_pretrained(folder / name).eval()
        for name in ("grown", "small")
    )
    return Explorer(grown, Vocabulary(byte_tokenizer()), folder / "site", small)


@pytest.fixture(scope="module")
def address(explorer):
    listener = bind("127.0.0.1", 0)
    threading.Thread(target=explorer.run, args=(listener,), daemon=True).start()
    host, port = listener.getsockname()
    return f"http://{host}:{port}"


def test_a_token_switched_off_changes_loss_and_continuation(page, explorer, address):
    model, text = explorer.model, "The [[quick]] brown fox & a <b>la"
    ids = torch.tensor([list(text.encode())])
    tokenizer = byte_tokenizer()

    def measured():
        with torch.no_grad():
            loss = model(input_ids=ids, labels=ids).loss.item()
        return f"{loss:.3f}", continue_text(model, tokenizer, text, max_new_tokens=60)

    page.open(f"{address}/#/live")
    box = page.find("textarea")
    box.clear()
    box.send_keys(text)
    status = "document.querySelector('.live [role=status]').textContent === arguments[0]"
    page.wait(status, f"{len(text)} positions")
    loss, continuation = measured()
    page.wait("document.querySelector('.comparison .figure').textContent === arguments[0]", loss)
    assert same_text(page.texts(".comparison .context")[0], continuation)
    names = page.texts(".comparison tbody th")
    assert names == ["all tokens on", "before growth"]
    token = page.texts(".detail .alike .name")[0]
    page.find(".detail .off").click()
    page.wait("document.querySelectorAll('.comparison tbody tr').length === 3")
    with intervene(model, off=[token]):
        off_loss, off_continuation = measured()
    assert page.texts(".comparison tbody th")[1] == "switched off"
    shown = page.texts(".comparison .figure")[2]
    assert shown.startswith(off_loss)
    change = float(off_loss) - float(loss)
    assert math.isclose(float(shown.split()[1].replace(MINUS, "-")), change, abs_tol=1.1e-3)
    assert same_text(page.texts(".comparison .context")[1], off_continuation)
    layer, _, number = token.rpartition(".")
    page.run("location.hash = `#/token/${arguments[0]}/${arguments[1]}`", layer, number)
    assert page.find(".tags .off").get_attribute("aria-pressed") == "true"
    page.find(".tags .off").click()
    page.find("[data-tab=live]").click()
    page.wait("document.querySelectorAll('.comparison tbody tr').length === 2")
    assert page.texts(".offs") == [""]


def same_text(shown: str, text: str) -> bool:
    return shown.split() == text.split()


def test_the_server_changes_nothing_in_the_model(explorer):
    before = {name: tensor.clone() for name, tensor in explorer.model.state_dict().items()}
    answer = explorer.answer({"text": "The fox", "off": ["1.ffn.3", "0.q.1"]})
    assert [run["name"] for run in answer["runs"]] == [
        "all tokens on", "switched off", "before growth",
    ]  # fmt: skip
    for name, tensor in explorer.model.state_dict().items():
        assert torch.equal(tensor, before[name])
