"""Answers on disk: whole or gone, and never those of another model."""

import json

import pytest
import torch

from tokenformer.evaluate.answers import Answers, batch_key, fingerprint

FIRST = [(-1.2345678901234567, True), (-0.1, False)]


def test_answers_come_back_to_the_last_bit_and_go_when_all_is_done(tmp_path):
    path = tmp_path / "deep" / "answers.jsonl"
    answers = Answers(path)
    assert answers.get("a") is None
    answers.add("a", FIRST)
    again = Answers(path)  # while the first still has it open: as after a kill
    assert again.get("a") == FIRST
    assert isinstance(again.get("a")[0][1], bool)
    again.finish()
    assert not path.exists()


@pytest.mark.parametrize("kept", range(1, 30, 4))
def test_a_line_cut_short_is_dropped_and_written_anew(kept, tmp_path):
    path = tmp_path / "answers.jsonl"
    answers = Answers(path)
    answers.add("a", FIRST)
    answers.add("b", FIRST)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[1][:kept])
    torn = Answers(path)
    assert torn.known == {"a": FIRST}
    torn.add("b", FIRST)
    assert Answers(path).known == {"a": FIRST, "b": FIRST}
    assert [json.loads(line)[0] for line in path.read_text().splitlines()] == ["a", "b"]


def test_a_spoiled_line_is_passed_over(tmp_path):
    path = tmp_path / "answers.jsonl"
    Answers(path).add("a", FIRST)
    path.write_bytes(b'\0\0\n["b", [[-1.\n' + path.read_bytes())
    assert Answers(path).known == {"a": FIRST}


def test_a_key_is_of_a_whole_batch_in_its_order():
    one, other = ["context", " answer", [1, 2]], ["context", " else", [1, 3]]
    keys = [batch_key(batch) for batch in ([one], [other], [one, other], [other, one])]
    assert len(set(keys)) == 4
    assert batch_key([one]) == keys[0]


def test_a_fingerprint_is_of_weights_configuration_and_settings(make_model, tmp_path):
    model = make_model("tokenformer")
    folders = [tmp_path / "here", tmp_path / "there"]
    for folder in folders:
        model.save_pretrained(folder)
    here, there = (type(model).from_pretrained(folder, dtype="auto") for folder in folders)
    assert fingerprint(here, max_length=64) == fingerprint(there, max_length=64)
    before = fingerprint(model, max_length=64)
    assert fingerprint(model, max_length=32) != before
    assert fingerprint(model.float(), max_length=64) != before
    model.double()
    model.config.norm_eps *= 2
    assert fingerprint(model, max_length=64) != before
    model.config.norm_eps /= 2
    tensor = model.get_input_embeddings().weight
    with torch.no_grad():
        tensor[0, 0] = torch.nextafter(tensor[0, 0], tensor[0, 0] + 1)
    assert fingerprint(model, max_length=64) != before
