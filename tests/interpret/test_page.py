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


@pytest.mark.parametrize("width", [320, 390, 700, 768, 900, 1024, 1280, 1600])
def test_the_text_that_fired_is_in_view(page, folder, width):
    page.resize(width, 800)
    for view in ("tokens?sort=work", "", "token/1.ffn/7"):
        page.open(f"{from_disk(folder)}#/{view}")
        page.wait("document.querySelectorAll('.snippet mark').length > 5")
        assert page.run(CLIPPED) == [], view


CLIPPED = """
const marks = [...document.querySelectorAll('.snippet mark')];
return marks.filter((mark) => {
  const {left, right} = mark.getBoundingClientRect();
  if (right - left < 4 || left < 0 || right > innerWidth) return true;
  for (let e = mark.parentElement; e.id !== 'main'; e = e.parentElement) {
    const around = e.getBoundingClientRect(), hides = getComputedStyle(e).overflowX !== 'visible';
    if (hides && (left < around.left - 1 || right > around.right + 1)) return true;
  }
  return false;
}).map((e) => e.closest('a, .snippet').textContent);
"""


@pytest.mark.parametrize("width", [320, 390, 768])
def test_the_tables_of_the_overview_fit(page, folder, width):
    page.resize(width, 800)
    page.open(from_disk(folder))
    page.find(".ages")
    wide = """return [...document.querySelectorAll('.scroll, .layers a, .ages td, .ages th')]
      .filter((e) => e.checkVisibility() && e.scrollWidth > e.clientWidth + 1)
      .map((e) => e.outerHTML)"""
    assert page.run(wide) == []


@pytest.mark.parametrize("dark", [False, True])
def test_weak_highlights_can_be_seen_and_strong_ones_read(page, folder, dark):
    page.resize(1280, 800, dark=dark)
    page.open(f"{from_disk(folder)}#/token/1.ffn/7")
    page.wait("document.querySelector('.contexts .context')")
    page.run(
        """document.querySelector('.contexts .context').replaceChildren(
          ...highlighted(Array.from({length: 9}, (_, i) => [`level ${i + 1} `, i + 1])))"""
    )
    found = page.run(LEVELS)
    assert len(found) == 9
    assert min(ratio for ratio, _ in found) >= 1.3, "to the card"
    assert [ratio for ratio, _ in found] == sorted(ratio for ratio, _ in found)
    assert min(text for _, text in found) >= 4.5


@pytest.mark.parametrize(
    "view",
    [
        "token/1.ffn/1.5", "token/1.ffn/", "token/1.ffn/999", "token/1.ffn/-1", "token/9.x/0",
        "token", "tokens?sort=bogus", "tokens?sort=constructor", "tokens?layer=9.x",
        "constructor", "toString/1", "examples/9", "examples/x", "%00",
    ],
)  # fmt: skip
def test_an_address_of_nothing_says_not_found(page, folder, view):
    page.open(f"{from_disk(folder)}#/{view}")
    assert page.wait("document.querySelector('main h1')?.textContent") == "Not found"
    assert re.match("There is no (token|column|layer|page|example|such page)",
                    page.find("main .hint").text)  # fmt: skip


UNNAMED = """
const kinds = 'a, button, input, select, textarea, [tabindex]';
const named = (e) => (e.innerText || '').trim() || e.getAttribute('aria-label');
return [...document.querySelectorAll(kinds)]
  .filter((e) => e.id !== 'main' && e.checkVisibility() && !named(e))
  .map((e) => e.outerHTML.slice(0, 200));
"""
COLORS = """
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
"""
CONTRASTS = f"""{COLORS}
const found = [];
for (const e of document.querySelectorAll('main *, header *')) {{
  const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
  const style = getComputedStyle(e);
  if (!own || !e.checkVisibility() || style.backgroundClip === 'text') continue;
  const pair = [luminance(rgba(style.color).slice(0, 3)), luminance(behind(e))];
  const [a, b] = pair.sort((x, y) => y - x);
  found.push([e.textContent.slice(0, 40), (a + .05) / (b + .05)]);
}}
return found.sort((a, b) => a[1] - b[1]).slice(0, 5);
"""
LEVELS = f"""{COLORS}
const ratio = (a, b) => (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
const marks = document.querySelector('.contexts .context').querySelectorAll('mark');
return [...marks].map((e) => {{
  const mark = luminance(behind(e)), card = luminance(behind(e.parentElement));
  return [ratio(mark, card), ratio(luminance(rgba(getComputedStyle(e).color)), mark)];
}});
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
    places = ["class token", *(f"row {n // 2 + 1}, column {n % 2 + 1}" for n in range(4))]
    positions = layer.top_positions[3].tolist()
    assert page.texts(".contexts .where") == [places[n] for n in positions]
    number = int((layer.top_positions[:, 0] == 0).nonzero()[0])
    page.open(f"{address}#/token/0.ffn/{number}")
    assert page.find(".contexts .where").text == "class token"
    assert "class token, weight" in page.find(".contexts .picture").get_attribute("aria-label")
    assert page.run("return document.querySelector('.contexts .fired')") is None
    assert "of patches and class tokens: fires" in page.find(".facts").text
    page.open(address)
    assert "80\npatches read" in page.find(".facts").text
    page.open(f"{address}#/tokens")
    page.wait("document.querySelectorAll('.row .thumb canvas').length > 5")
    assert page.find(".head .what").text == "fires at, promotes"
    images = page.run(PLACES)
    assert images
    assert all(place in places for _, place, _ in images)
    assert all((place == "class token") == (shown == "class token") for _, place, shown in images)
    page.open(f"{address}#/examples/0")
    walk = page.find(".walk")
    walk.send_keys(DOWN)
    assert walk.get_attribute("aria-valuetext") == "Patch in row 2, column 2"
    page.find(".walks button").click()
    assert walk.get_attribute("aria-valuetext") == "Class token"
    assert "null" not in page.find("main").text


PLACES = """
return [...document.querySelectorAll('.row .thumb')].map((thumb) => [
  ...thumb.querySelector('.picture').getAttribute('aria-label').split(/, (.*)/).slice(0, 2),
  thumb.querySelector('small')?.textContent ?? '',
]);
"""


def test_images_keep_their_colors_where_a_token_fires(page, tmp_path, folder):
    """The patch with the largest weight is not tinted, others are dimmed but not hidden."""
    site = shutil.copytree(folder / "site", tmp_path / "site")
    page.open(f"file://{site / 'index.html'}#/")
    page.find(".layers")
    alphas = page.run(
        """TF.site.image = [1, 8, 8, 2, 2];
        TF.site.classTokens = 1;
        const shown = picture(btoa('a'.repeat(64)), '19420', 1, 'image');
        main.replaceChildren(shown);
        const read = {willReadFrequently: true};
        const canvas = document.createElement('canvas').getContext('2d', read);
        return [...shown.querySelectorAll('.patches span')].map((e) => {
          canvas.clearRect(0, 0, 1, 1);
          canvas.fillStyle = getComputedStyle(e).backgroundColor;
          canvas.fillRect(0, 0, 1, 1);
          return canvas.getImageData(0, 0, 1, 1).data[3] / 255;
        })"""
    )
    assert alphas[0] == 0
    assert alphas == sorted(alphas)
    assert 0.3 < alphas[-1] < 0.65


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


def test_an_error_clears_the_results_of_another_text(chromium, address):
    page = chromium
    page.resize(1280)
    page.open(f"{address}/#/live")
    page.find(".comparison")
    box = page.find("textarea")
    page.run(
        """const box = document.querySelector('textarea');
        box.value = 'a\\ud800b';
        box.dispatchEvent(new Event('input'))"""
    )
    page.wait(f"{STATUS}.includes('half a character')")
    assert page.all(".comparison, .maps") == []
    box.clear()
    box.send_keys("The fox")
    page.wait(f"{STATUS} === '7 positions'")
    page.find(".comparison")
    assert [entry for entry in page.errors() if "400" not in entry] == []


def test_stale_requests_are_cancelled(page, address):
    page.open(f"{address}/#/live")
    page.find(".comparison")
    page.run(
        """const box = document.querySelector('textarea'), send = window.fetch;
        window.signals = [];
        window.fetch = (path, options) => {
          signals.push(options.signal);
          return send(path, options);
        };
        LIVE.off.add('1.ffn.3');
        document.querySelector('.live > div:last-child').dispatchEvent(new Event('switched'));
        LIVE.off.delete('1.ffn.3');
        document.querySelector('.live > div:last-child').dispatchEvent(new Event('switched'));"""
    )
    assert page.run("return signals.map((signal) => signal.aborted)") == [True, False]
    page.wait("document.querySelector('.live [role=status]').textContent.endsWith(' positions')")
    assert len(page.all(".comparison tbody tr")) == 2
    page.run(
        """document.querySelector('.live > div:last-child').dispatchEvent(new Event('switched'));
        location.hash = '#/'"""
    )
    page.find(".layers")
    assert page.run("return signals[2].aborted")


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
