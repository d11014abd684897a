"""Plots and pages of score maps show the weights that the maps hold."""

import re
from html.parser import HTMLParser

import pytest
import torch

from tokenformer.data.byte_tokenizer import VOCAB_SIZE, byte_tokenizer
from tokenformer.interpret.score_map import score_maps
from tokenformer.interpret.score_plot import patch_grid, plot_patches, plot_scores, write_scores
from tokenformer.interpret.token_name import Token
from tokenformer.interpret.vocabulary import Vocabulary

TEXT = "<b>naïve</b> & 日本"


class Cells(HTMLParser):
    """The text and the weights in the cells of every table."""

    def __init__(self):
        super().__init__()
        self.texts, self.weights, self.inside = [], [], False

    def handle_starttag(self, tag, attributes):
        self.inside = tag != "th" and (self.inside or tag == "td")
        if tag == "td":
            self.texts.append("")
            self.weights.append([])
        if tag == "mark":
            self.weights[-1].append(float(dict(attributes)["style"].partition(":")[2]))

    def handle_endtag(self, tag):
        self.inside = self.inside and tag != "table"

    def handle_data(self, data):
        if self.inside:
            self.texts[-1] += data


@pytest.fixture
def vocabulary():
    return Vocabulary(byte_tokenizer())


def test_pieces_join_to_the_text(vocabulary):
    ids = list(TEXT.encode())
    pieces = vocabulary.pieces(ids)
    assert len(pieces) == len(ids)
    assert "".join(pieces) == TEXT
    assert pieces[-3:] == ["", "", "本"]
    assert vocabulary.pieces(ids[:-1])[-1] == "\N{REPLACEMENT CHARACTER}"
    assert [vocabulary.label(n) for n in (97, 10, 226, 256)] == [
        "a", "\\n", "\\xe2", "<|endoftext|>",
    ]  # fmt: skip
    assert Vocabulary().label(7) == "7"


def test_the_page_shows_the_text_with_every_weight(make_model, tmp_path, vocabulary):
    model = make_model("tokenformer", vocab_size=VOCAB_SIZE)
    maps = score_maps(model, torch.tensor([list(TEXT.encode())]), ["1.ffn"])
    write_scores(maps, tmp_path / "page.html", vocabulary, tokens=3, title="<T>")
    page = (tmp_path / "page.html").read_text()
    assert "&lt;T&gt;" in page
    assert not re.search(r"https?:|<script", page)
    cells = Cells()
    cells.feed(page)
    assert cells.texts == [TEXT] * 3
    strongest = maps["1.ffn"].contributions[0].amax(0).argmax()
    weights = maps["1.ffn"].weights[0, :, strongest].clamp_min(0)
    at = [i for i, piece in enumerate(vocabulary.pieces(list(TEXT.encode()))) if piece]
    for shown, position in zip(cells.weights[0][:5], at[:5], strict=True):
        assert shown == pytest.approx(0.75 * float(weights[position] / weights.max()), abs=6e-3)


def test_plots_of_text_and_images(make_model, make_classifier, tmp_path, vocabulary):
    model = make_model("tokenformer", vocab_size=VOCAB_SIZE)
    maps = score_maps(model, torch.tensor([list(b"costs $5 or $6")]))
    plot_scores(maps, "0.q", tmp_path / "scores.png", vocabulary)
    images = torch.randn(2, 1, 12, 12).double()
    patches = score_maps(make_classifier(), images)
    plot_patches(patches, [Token("0.ffn", 3), Token("1.q", 0)], tmp_path / "patches.png")
    write_scores(patches, tmp_path / "patches.html", tokens=2)
    for name in ("scores.png", "patches.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    assert patch_grid(patches, torch.arange(10)).tolist() == [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    assert (tmp_path / "patches.html").read_text().count("data:image/png") == 2 * len(patches)
    with pytest.raises(ValueError, match="the input is text"):
        plot_patches(maps, [Token("0.ffn", 3)], tmp_path / "none.png")
