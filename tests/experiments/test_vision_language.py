"""The study of vision-language models: its questions, its data, and all of it in small."""

import json
import re
from pathlib import Path

import pytest

from experiments import vision_language
from experiments.__main__ import main
from experiments.exhibit import SCALES
from experiments.job import Results
from experiments.vision_language import (
    EQUAL,
    PROJECTOR,
    ROUTED,
    RUNS,
    question_arms,
)
from experiments.vision_language.caption_run import CaptionRun
from experiments.vision_language.image_texts import (
    colors_of,
    count_people,
    photographs,
    questions,
    write_image_text,
)
from experiments.vision_language.question_run import QuestionRun, accuracies, majority


@pytest.mark.parametrize(
    ("caption", "people"),
    [
        ("A black dog runs .", 0),
        ("A man and a woman sit .", 2),
        ("Two young men watch a girl .", 3),
        ("Three boys with two other kids", None),  # five, or three?
        ("Men on a boat", None),
        ("A group of people", None),
        ("A couple on a bench", None),
    ],
)
def test_people_are_counted(caption, people):
    assert count_people(caption.lower().split()) == people


def test_colors_are_those_of_the_thing():
    words = re.findall("[a-z]+", "a brown dog and a black and white dog with a red ball")
    assert colors_of("dog", words) == ["brown"]
    assert colors_of("ball", words) == ["red"]


def test_questions_are_asked_where_captions_agree():
    captions = ["A brown dog in the snow ."] * 3 + ["A dog plays .", "A man and his dog ."]
    found = {question.text: question for question in questions(captions, number=0)}
    kinds = [question.kind for question in found.values()]
    assert kinds == ["is there", "is there", "how many", "what color"]
    assert found["What color is the dog?"].answer == "brown"
    assert found["How many people are there?"].answer == "none"
    asked = {question.answer: text for text, question in found.items() if "Is there" in text}
    assert asked["yes"] in ("Is there a dog?", "Is there snow?")
    assert "man" not in asked["no"], "one caption mentions a man: neither yes nor no"
    for question in found.values():
        assert question.answer in question.choices
    mixed = ["A brown dog .", "A brown dog .", "A black dog ."]
    assert "what color" not in {question.kind for question in questions(mixed, 0)}


def test_a_set_of_questions_can_be_read(tmp_path):
    from tokenformer.data.image_text_sources import load_image_text

    write_image_text("image-questions", tmp_path / "questions", None)
    splits = load_image_text(str(tmp_path / "questions"))
    sample = splits.train.sample(0)
    assert [turn.role for turn in sample.turns] == ["user", "assistant"]
    assert sample.turns[0].text.startswith("<image>")
    lines = (tmp_path / "questions" / "train.jsonl").read_text().splitlines()
    assert {json.loads(line)["kind"] for line in lines} == {"is there", "how many", "what color"}


@pytest.mark.parametrize("name", ["captions", "questions"])
def test_without_seeing_every_text_is_of_another_image(name, tmp_path):
    sets = {"captions": ("flickr8k", "other-images")}
    sets["questions"] = ("image-questions", "other-images-questions")
    rows = []
    for place in sets[name]:
        write_image_text(place, tmp_path / place, None)
        lines = (tmp_path / place / "train.jsonl").read_text().splitlines()
        rows.append([json.loads(line) for line in lines])
    for own, other in zip(*rows, strict=True):
        assert own.pop("image") != other.pop("image")
        assert own == other
    images = [sorted((tmp_path / place / "train").iterdir()) for place in sets[name]]
    assert [one.read_bytes() for one in images[0]] == [one.read_bytes() for one in images[1]]


def test_questions_of_flickr8k(real_data):
    """Half of those about objects have the answer no, and the majority is far from always right."""
    source = Path(real_data("image-text/flickr8k"))
    found = [
        {
            "kind": question.kind,
            "messages": [{"content": question.text}, {"content": question.answer}],
        }
        for number, photograph in enumerate(photographs(source, "validation"))
        for question in questions(photograph.captions, number)
    ]
    objects = [row["messages"][1]["content"] for row in found if row["kind"] == "is there"]
    assert 0.4 < objects.count("yes") / len(objects) < 0.6
    assert 0.5 < accuracies(found, majority(found, found))["all"] < 0.75


def test_arms_are_compared_at_equal_trained_parameters():
    new = CaptionRun().new_tokens * 2 * 128 * 5 * 4
    projector = 2 * 128 * CaptionRun().projector
    assert new == projector
    for ours, theirs in EQUAL.items():
        assert RUNS[ours].trained == RUNS[theirs].trained


def test_questions_go_on_from_the_same_seed_of_the_captions():
    laptop, results = SCALES["laptop"], Results(Path("/nonexistent"))
    for _ in range(5):  # the plan grows with the results
        for job in vision_language.plan(laptop, results):
            results.rows[job.key] = {"key": job.key, "loss": abs(job.rate - 2e-3)}
    for name, arm in question_arms(laptop, results).items():
        for seed, run in enumerate(arm.runs):
            assert isinstance(run, QuestionRun)
            assert (run.seed, run.start.seed) == (seed, seed), name
            assert run.start.mode == ("projector" if "projector" in name else "routed")
    assert RUNS[ROUTED].trained == RUNS[PROJECTOR].trained == "new"


@pytest.mark.slow
def test_smoke(tmp_path):
    main(["run", "vision_language", "--scale", "smoke", "--out", str(tmp_path)])
    text = (tmp_path / "report.md").read_text()
    assert "gain from seeing" in text
    assert (tmp_path / "images" / "vision-language.png").exists()
