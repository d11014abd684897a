"""Export the model of a run as a Hugging Face folder, which the Auto classes load."""

import shutil
from glob import escape
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.utils import logging

from tokenformer import files
from tokenformer.errors import CheckpointError
from tokenformer.models.model_card import CARD, is_edited, write_card
from tokenformer.train.checkpoint.tensors import model_tensors, not_finite, unwrap
from tokenformer.train.parallel.ranks import Ranks
from tokenformer.train.run_history import run_history


def export(model: nn.Module, preprocessor: Any, folder: Path) -> Path:
    """Write the model and its tokenizer or image processor, if any, to `folder`, atomically.

    Replaces an older export, but keeps a model card that was edited. A new card contains the
    history of the run that `folder` is in.

    Collective: rank 0 gathers the shards of the other ranks, one tensor at a time, and writes.
    """
    path, ranks = Path(folder), Ranks()
    task = f"export {path} cannot be written"
    tensors = model_tensors(model)
    with ranks.together(task):
        if name := not_finite(tensors):
            raise CheckpointError(f"{name} holds a NaN or an infinity")
    whole: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if ranks.first:
            whole[name.removeprefix("model.")] = full.cpu()
    with ranks.together(task):
        if ranks.first:
            unfinished = files.start_folder(path, siblings=escape(path.name))
            try:
                if is_edited(path):
                    shutil.copyfile(path / CARD, unfinished / CARD)
                write(unwrap(model), whole, preprocessor, unfinished)
                config: Any = unwrap(model).config
                write_card(unfinished, config, run_history(path.parent))
                files.finish_folder(unfinished, path)
            except BaseException:
                files.discard_folder(unfinished)
                raise
    return path


def write(model: Any, tensors: dict[str, Tensor], preprocessor: Any, folder: Path) -> None:
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # it would break the progress display of the run
    try:
        model.save_pretrained(folder, state_dict=tensors)
    finally:
        if shown:
            logging.enable_progress_bar()
    if preprocessor is not None:
        preprocessor.save_pretrained(folder)
