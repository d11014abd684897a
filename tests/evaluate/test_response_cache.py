"""The response cache: survives a kill, and never returns responses of another model."""

import json

import pytest
import torch

from tokenformer.evaluate.response_cache import ResponseCache, batch_key, fingerprint

RESPONSES = [(-1.2345678901234567, True), (-0.1, False)]


def test_responses_are_read_back_exactly_and_deleted_at_the_end(tmp_path):
    path = tmp_path / "deep" / "responses.jsonl"
    cache = ResponseCache(path)
    assert cache.get("a") is None
    cache.add("a", RESPONSES)
    again = ResponseCache(path)  # while the first is still open, as after a kill
    assert again.get("a") == RESPONSES
    assert isinstance(again.get("a")[0][1], bool)
    again.delete()
    assert not path.exists()


@pytest.mark.parametrize("kept", range(1, 30, 4))
def test_a_truncated_line_is_dropped_and_written_again(kept, tmp_path):
    path = tmp_path / "responses.jsonl"
    cache = ResponseCache(path)
    cache.add("a", RESPONSES)
    cache.add("b", RESPONSES)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[1][:kept])
    torn = ResponseCache(path)
    assert torn.batches == {"a": RESPONSES}
    torn.add("b", RESPONSES)
    assert ResponseCache(path).batches == {"a": RESPONSES, "b": RESPONSES}
    assert [json.loads(line)[0] for line in path.read_text().splitlines()] == ["a", "b"]


def test_a_damaged_line_is_skipped(tmp_path):
    path = tmp_path / "responses.jsonl"
    ResponseCache(path).add("a", RESPONSES)
    path.write_bytes(b'\0\0\n["b", [[-1.\n' + path.read_bytes())
    assert ResponseCache(path).batches == {"a": RESPONSES}


def test_a_key_depends_on_all_requests_of_a_batch_and_their_order():
    one, other = ["context", " answer", [1, 2]], ["context", " else", [1, 3]]
    keys = [batch_key(batch) for batch in ([one], [other], [one, other], [other, one])]
    assert len(set(keys)) == 4
    assert batch_key([one]) == keys[0]


def test_a_fingerprint_covers_weights_configuration_and_settings(make_model, tmp_path):
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
