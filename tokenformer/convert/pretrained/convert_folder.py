"""A pretrained Transformer's folder to one of ours: model, tokenizer, generation and report."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from tokenformer.convert.pretrained.calibration_text import Text, read_text
from tokenformer.convert.pretrained.conversion_report import REPORT, ConversionReport, Distilled
from tokenformer.convert.pretrained.distillation import distil
from tokenformer.convert.pretrained.from_transformer import from_transformer
from tokenformer.convert.pretrained.source_comparison import compare
from tokenformer.convert.source import Source
from tokenformer.convert.tokenizer import find_tokenizer
from tokenformer.errors import ConversionError
from tokenformer.models.loading import IncompleteModelError, load_whole
from tokenformer.train.parallel.distribute import device

STEPS = 200


def convert_transformer(
    source: Source,
    out: Path,
    data: Path | None = None,
    distill: Path | None = None,
    steps: int | None = None,
    linear: str = "pair",
    tokenizer: str | None = None,
    no_verify: bool = False,
    on_progress: Callable[[str], None] = lambda line: None,
) -> ConversionReport:
    """`data` is text to fit and measure on, `distill` text to train on towards the source, by
    default the same; `steps` of that training."""
    if steps is not None and distill is None:
        raise ConversionError(f"--steps {steps} is for --distill DATA")
    if steps is not None and steps < 1:
        raise ConversionError(f"--steps {steps} must be at least 1")
    if distill is not None and linear == "shift":
        raise ConversionError(
            "--linear shift is not for --distill: its tokens all have nearly the same weight, and "
            "training moves them together; give --linear pair"
        )
    original = load(source.path, verify=not no_verify)
    found = find_tokenizer(tokenizer, source.folder, original.config.vocab_size)
    encoder = None if found is None else found.tokenizer
    texts = {
        option: None if path is None else read_text(option, path, encoder, original.config)
        for option, path in {"--data": data, "--distill": distill}.items()
    }
    text = texts["--data"] or texts["--distill"]
    measured = texts["--distill"] or text  # before and after training on the same
    layers = original.config.num_hidden_layers
    try:
        model, report = from_transformer(
            original,
            None if text is None else text.batches(),
            held_out=None if measured is None else measured.held_out_batches(),
            linear=linear,
            on_layer=lambda done: on_progress(f"{done} of {layers} layers"),
        )
    except ValueError as error:
        line = str(error).replace("batches is missing", "--data is missing")
        raise ConversionError(line) from None
    if (lesson := texts["--distill"]) is not None:
        report.distilled = distilled(model, original, lesson, steps or STEPS, on_progress)
    if (settings := writable(original.generation_config)) is not None:
        model.generation_config = settings
    model.save_pretrained(out)
    if found is not None:
        found.tokenizer.save_pretrained(out)
    report.tokenizer = None if found is None else found.origin
    report.save(out / REPORT)
    return report


def load(folder: Path, *, verify: bool = True) -> Any:
    """From safetensors alone."""
    from transformers import AutoModelForCausalLM

    import tokenformer  # noqa: F401  # so that the Auto classes know our twin

    try:
        model = load_whole(
            AutoModelForCausalLM, str(folder), verify=verify, dtype="auto", use_safetensors=True
        )
    except IncompleteModelError as error:
        raise ConversionError(str(error)) from None
    return model.to(device()).eval()


def writable(settings: Any) -> Any:
    """Generation settings as transformers writes them, which is stricter than how it reads them:
    those of Llama 2 name a temperature and do not say that they sample. None where that is not all.
    """
    for samples in (settings.do_sample, True):
        settings.do_sample = samples
        with suppress(ValueError):
            settings.validate(strict=True)
            return settings
    return None


def distilled(
    model: Any, source: Any, text: Text, steps: int, on_progress: Callable[[str], None]
) -> Distilled:
    distil(
        model,
        source,
        text.tokens,
        text.held_out,
        steps=steps,
        length=text.length,
        on_step=lambda row: on_progress(
            f"distilling: step {row['step']} of {steps}, divergence {row['loss']:.2e} nats"
        ),
    )
    return Distilled(steps, compare(source, model, text.held_out_batches()))
