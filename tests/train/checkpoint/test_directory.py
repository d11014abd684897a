"""Damaged checkpoints are found, old ones deleted."""

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.support.checkpoint_worker import make_model
from tests.support.checkpoints import add_a_shard, flip_a_bit, forge, truncate, two_checkpoints
from tokenformer import files
from tokenformer.errors import CheckpointError
from tokenformer.train import checkpoint
from tokenformer.train.checkpoint import directory, latest, load, prune, save

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class TestDamage:
    @pytest.mark.parametrize(
        ("name", "damage", "message"),
        [
            ("shard-00001-*", truncate, r"shard-00001-\S+ has \d+ of \d+ bytes"),
            ("shard-00001-*", flip_a_bit, r"shard-00001-\S+ was altered"),
            ("shard-00001-*", Path.unlink, r"shard-00001-\S+ is missing"),
            ("shard-00001-*", add_a_shard, r"shard-00009-\S+ is not listed"),
            ("state.json", flip_a_bit, r"state\.json was altered"),
            ("manifest.json", truncate, r"manifest\.json is torn or altered"),
            ("manifest.json", Path.unlink, r"manifest\.json is missing"),
            *(
                (
                    "manifest.json",
                    lambda file, text=text: file.write_text(text),
                    r"manifest\.json is",
                )
                for text in ("{}", "[]", "null", '{"format": 1, "files": [3]}', "[" * 100_000)
            ),
            *(
                ("state.json", forge(text), r"state\.json is not the state of a checkpoint")
                for text in (
                    *(b"{}", b"[]", b"null", b"7", b'"x"', b"", b"\xff", b"[" * 100_000),
                    *(b'{"state": {}}', b'{"state": [], "optimizer": null}'),
                    b'{"state": {"step": "3"}, "optimizer": null}',
                    b'{"state": {"step": 3}, "optimizer": [{}]}',
                    b'{"state": {"step": 3}, "optimizer": 5}',
                )
            ),
        ],
    )
    def test_it_is_named_and_the_one_before_is_used(self, tmp_path, name, damage, message):
        older, newer = two_checkpoints(tmp_path)
        assert latest(tmp_path) == newer
        damage(next(newer.glob(name)))
        model = make_model(seed=1)
        before = model.model.norm.weight.clone()
        with pytest.raises(CheckpointError, match=f"step-00000010.*{message}"):
            load(newer, model=model)
        assert torch.equal(model.model.norm.weight, before)
        reports: list[str] = []
        assert latest(tmp_path, report=reports.append) == older
        assert len(reports) == 1
        assert "step-00000010" in reports[0]
        with pytest.warns(UserWarning, match="step-00000010"):
            assert latest(tmp_path) == older

    def test_where_all_are_damaged_it_refuses(self, tmp_path):
        for path in two_checkpoints(tmp_path):
            (path / "state.json").write_text("{}\n")
        reports: list[str] = []
        with pytest.raises(CheckpointError) as caught:
            latest(tmp_path, report=reports.append)
        assert len(reports) == 2
        assert str(caught.value) == (
            f"no valid checkpoint in {tmp_path}, 2 damaged (the newest: checkpoint "
            f"{tmp_path / 'step-00000010'}: {reports[0].partition(': ')[2].partition(';')[0]}); "
            f"restore one from a backup; to start over, remove the run folder or choose "
            "another --out"
        )

    @pytest.mark.parametrize("text", [b"{}", b"[]", b"null", b'{"state": {"step": 1}'])
    def test_a_malformed_state_is_named_by_all_that_read_it(self, tmp_path, text):
        path, _ = two_checkpoints(tmp_path)
        forge(text)(path / "state.json")
        for read in (checkpoint.read_state, checkpoint.read_document):
            with pytest.raises(CheckpointError, match=r"step-00000002 cannot be read: state\.json"):
                read(path)
        assert prune(tmp_path, keep_last=1) == []  # it is no checkpoint

    def test_a_state_without_what_is_needed_of_it(self, tmp_path):
        path, _ = two_checkpoints(tmp_path)
        assert checkpoint.read_state(path, {"step": int}) == {"step": 2}
        with pytest.raises(CheckpointError, match=r"step-00000002 .*has no 'config'"):
            checkpoint.read_state(path, {"config": dict})
        with pytest.raises(CheckpointError, match=r"'step' in state\.json is 2, not of type dict"):
            checkpoint.read_state(path, {"step": dict})

    def test_a_note_beside_the_files_does_no_harm(self, tmp_path):
        _, newer = two_checkpoints(tmp_path)
        (newer / "notes.txt").write_text("the good one")
        assert latest(tmp_path) == newer

    def test_no_folder_no_checkpoint(self, tmp_path):
        assert latest(tmp_path) is None
        assert latest(tmp_path / "absent") is None

    def test_what_is_not_a_checkpoint_is_refused(self, tmp_path):
        with pytest.raises(CheckpointError, match=r"manifest\.json is missing"):
            load(tmp_path, model=nn.Linear(1, 1))


class TestKeeping:
    def test_the_best_and_the_last_are_kept(self, tmp_path):
        for step in range(0, 60, 10):
            save(tmp_path, model=nn.Linear(1, 1), state={"step": step})
        removed = prune(tmp_path, keep_last=2, best=10)
        assert [path.name[-2:] for path in removed] == ["00", "20", "30"]
        assert list(directory.steps(tmp_path)) == [10, 40, 50]
        with pytest.raises(CheckpointError, match="keep_last=0"):
            prune(tmp_path, keep_last=0)

    def test_a_damaged_one_takes_no_place(self, tmp_path):
        older, newer = two_checkpoints(tmp_path)
        truncate(newer / "state.json")
        assert prune(tmp_path, keep_last=1) == []
        assert older.exists()

    def test_the_same_step_again_replaces(self, tmp_path):
        for value in (1, 2):
            path = save(tmp_path, model=nn.Linear(1, 1), state={"step": 5, "value": value})
        assert list(tmp_path.iterdir()) == [path]
        assert load(path, model=nn.Linear(1, 1))[0]["value"] == 2

    def test_it_replaces_where_the_system_cannot_swap(self, tmp_path, monkeypatch):
        monkeypatch.setattr(files.ctypes, "CDLL", lambda *name, **options: object())
        self.test_the_same_step_again_replaces(tmp_path)

    def test_leftovers_go_at_the_next_save(self, tmp_path):
        for word in ("unfinished", "deleted"):
            leftover = tmp_path / f".step-00000003.{word}-0011aabb"
            leftover.mkdir()
            (leftover / "shard").write_bytes(b"x" * 100)
        path = save(tmp_path, model=nn.Linear(1, 1), state={"step": 5})
        assert list(tmp_path.iterdir()) == [path]

    def test_what_a_killed_prune_left_is_swept(self, tmp_path):
        path = save(tmp_path, model=nn.Linear(1, 1), state={"step": 5})
        for word in ("unfinished", "deleted"):
            (tmp_path / f".step-00000003.{word}-0011aabb").mkdir()
        checkpoint.sweep(tmp_path)
        # A background thread may be writing the unfinished one.
        kept = [".step-00000003.unfinished-0011aabb", path.name]
        assert sorted(path.name for path in tmp_path.iterdir()) == kept

    def test_order_is_by_number(self, tmp_path):
        for step in (99_999_999, 100_000_000):
            path = save(tmp_path, model=nn.Linear(1, 1), state={"step": step})
        assert latest(tmp_path) == path
