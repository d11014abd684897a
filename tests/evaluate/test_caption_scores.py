"""BLEU and CIDEr-D, against COCO's evaluation code on real captions."""

from typing import Any

import datasets
import pytest

from tokenformer.evaluate.caption_scores import bleu, cider, words

# Of pycocoevalcap 1.2 (`CiderScorer(n=4, sigma=6.0)`, `BleuScorer(n=4)` with option="closest"): the
# first caption of 200 validation images of Flickr8k against the four others.
COCO_CIDER = 0.9135403184740228
COCO_BLEU = [0.6418979409128729, 0.46460680640156926, 0.32623554169273383, 0.22329649566826024]


@pytest.fixture(scope="module")
def flickr8k(real_data: Any) -> tuple[list[str], list[list[str]]]:
    file = str(real_data("image-text/flickr8k") / "validation.parquet")
    rows = datasets.load_dataset("parquet", data_files=file, split="train[:200]")
    captions = list(rows.select_columns(["captions"])["captions"])
    return [several[0] for several in captions], [several[1:] for several in captions]


def test_scores_of_real_captions_are_those_of_coco(flickr8k: Any) -> None:
    assert cider(*flickr8k) == pytest.approx(COCO_CIDER, abs=1e-9)
    assert bleu(*flickr8k) == pytest.approx(COCO_BLEU, abs=1e-9)


def test_bleu_is_that_of_sacrebleu(flickr8k: Any) -> None:
    sacrebleu = pytest.importorskip("sacrebleu")
    own, others = ([" ".join(words(t)) for t in flickr8k[0]], flickr8k[1])
    streams = [[" ".join(words(several[i])) for several in others] for i in range(4)]
    found = sacrebleu.corpus_bleu(own, streams, tokenize="none", smooth_method="none")
    assert bleu(*flickr8k)[3] == pytest.approx(found.score / 100)


def test_the_same_caption_has_the_highest_scores():
    texts = ["a black dog runs on the beach", "two children play football in a park"]
    references = [[text] for text in texts]
    assert bleu(texts, references) == pytest.approx([1.0] * 4)
    assert cider(texts, references) == pytest.approx(10.0)
    assert cider(texts[::-1], references) < 0.5


def test_short_and_empty_captions_have_no_score():
    references = [["a dog runs on the beach"], ["a man rides a bike"]]
    assert bleu(["", ""], references) == [0.0] * 4
    assert cider(["", ""], references) == 0
    found = bleu(["dog", "man"], references)
    assert 0 < found[0] < 0.1  # all words are right, but they are few
    assert found[1:] == [0.0] * 3


def test_unequal_numbers_are_refused():
    with pytest.raises(ValueError, match="1 captions and the references of 2 images"):
        bleu(["a"], [["a"], ["b"]])
    with pytest.raises(ValueError, match="no reference"):
        cider(["a"], [[]])
