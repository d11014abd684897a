"""Exports of a run as Hugging Face folders."""

import pytest
import torch
from torch import nn

from tests.support.checkpoints import assert_same, trained
from tokenformer.errors import CheckpointError
from tokenformer.train.export import export

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class TestExport:
    def test_auto_classes_load_it_and_it_replaces_an_older_one(self, tmp_path):
        import transformers

        from tokenformer.data.byte_tokenizer import byte_tokenizer

        folder = tmp_path / "model"
        older, _ = trained(1)
        export(older, None, folder)
        (folder / "stale.txt").write_text("")
        model, _ = trained(2)
        assert export(torch.compile(model), byte_tokenizer(), folder) == folder
        assert [path.name for path in tmp_path.iterdir()] == ["model"]
        assert not (folder / "stale.txt").exists()
        loaded = transformers.AutoModelForCausalLM.from_pretrained(folder)
        assert_same(loaded.state_dict(), model.state_dict())
        assert transformers.AutoTokenizer.from_pretrained(folder).decode([104, 105]) == "hi"

    def test_a_full_disk_leaves_the_older_export(self, small_disk):
        import transformers

        folder = small_disk / "model"
        model, _ = trained(1)
        export(model, None, folder)
        (small_disk / "filler").write_bytes(b"x" * (3 << 20))
        for layer in model.model.layers:
            layer.ffn.key_tokens = nn.Parameter(torch.zeros(1 << 13, 32))
        with pytest.raises(CheckpointError, match=r"export .*model cannot be written: .+"):
            export(model, None, folder)
        assert sorted(path.name for path in small_disk.iterdir()) == ["filler", "model"]
        transformers.AutoModelForCausalLM.from_pretrained(folder)
