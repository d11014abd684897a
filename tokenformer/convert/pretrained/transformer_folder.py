"""Converting the folder of a pretrained Transformer: model, tokenizer, generation and report."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from transformers.modeling_utils import PreTrainedModel

from tokenformer.convert.pretrained.calibration_data import CalibrationData, read_calibration_data
from tokenformer.convert.pretrained.conversion_report import (
    REPORT,
    ConversionReport,
    DistillationResult,
)
from tokenformer.convert.pretrained.distillation import distill_model
from tokenformer.convert.pretrained.from_transformer import from_transformer
from tokenformer.convert.pretrained.source_comparison import compare_with_source
from tokenformer.convert.source import Source
from tokenformer.convert.source_tokenizer import find_tokenizer
from tokenformer.errors import ConversionError
from tokenformer.models.language import TokenformerForCausalLM
from tokenformer.models.loading import IncompleteModelError, device, load_pretrained

STEPS = 200

OnProgress = Callable[[str, int, int], None]
"""Takes a description, how much is done, and the total."""


def convert_transformer(
    source: Source,
    out: Path,
    data: Path | None = None,
    distill: Path | None = None,
    steps: int | None = None,
    linear: str = "pair",
    tokenizer: str | None = None,
    no_verify: bool = False,
    on_progress: OnProgress = lambda description, done, total: None,
) -> ConversionReport:
    """Convert a folder. `data` is calibration data, by default that of `distill`, which is the text
    to distill on for `steps`. `on_progress` is called after every layer and step."""
    if steps is not None and distill is None:
        raise ConversionError(f"--steps {steps} needs --distill DATA")
    if steps is not None and steps < 1:
        raise ConversionError(f"--steps {steps} must be at least 1")
    if distill is not None and linear == "shift":
        raise ConversionError(
            "--linear shift cannot be distilled: its tokens all have nearly the same weight, so "
            "training moves them together; give --linear pair"
        )
    original = load(source.path, verify=not no_verify)
    found = find_tokenizer(tokenizer, source.folder, original.config.vocab_size)
    encoder = None if found is None else found.tokenizer
    texts = {
        option: None
        if path is None
        else read_calibration_data(option, path, encoder, original.config)
        for option, path in {"--data": data, "--distill": distill}.items()
    }
    text = texts["--data"] or texts["--distill"]
    measured = texts["--distill"] or text  # the same before and after distillation
    layers = original.config.num_hidden_layers
    try:
        model, report = from_transformer(
            original,
            None if text is None else text.batches(),
            held_out=None if measured is None else measured.held_out_batches(),
            linear=linear,
            on_layer=lambda done: on_progress(f"{done} of {layers} layers", done, layers),
        )
    except ValueError as error:
        line = str(error).replace("batches is missing", "--data is missing")
        raise ConversionError(line) from None
    if (distill_data := texts["--distill"]) is not None:
        report.distilled = distill_on(model, original, distill_data, steps or STEPS, on_progress)
    if (settings := writable(original.generation_config)) is not None:
        model.generation_config = settings
    model.save_pretrained(out)
    if found is not None:
        found.tokenizer.save_pretrained(out)
    report.tokenizer = None if found is None else found.location
    report.save(out / REPORT)
    return report


def load(folder: Path, *, verify: bool = True) -> PreTrainedModel:
    """Load a model, only from safetensors."""
    from transformers import AutoModelForCausalLM

    import tokenformer  # noqa: F401  # registers our models with the Auto classes

    try:
        model = load_pretrained(
            AutoModelForCausalLM, str(folder), verify=verify, dtype="auto", use_safetensors=True
        )
    except IncompleteModelError as error:
        raise ConversionError(str(error)) from None
    return model.to(device()).eval()


def writable(settings: Any) -> Any:
    """Return generation settings that transformers agrees to save, or None. It is stricter when
    saving than when loading: Llama 2 sets a temperature without `do_sample`."""
    for samples in (settings.do_sample, True):
        settings.do_sample = samples
        with suppress(ValueError):
            settings.validate(strict=True)
            return settings
    return None


def distill_on(
    model: TokenformerForCausalLM,
    source: PreTrainedModel,
    text: CalibrationData,
    steps: int,
    on_progress: OnProgress,
) -> DistillationResult:
    distill_model(
        model,
        source,
        text.tokens,
        text.held_out,
        steps=steps,
        length=text.length,
        on_step=lambda row: on_progress(
            f"distilling: step {row['step']} of {steps}, divergence {row['loss']:.2e} nats",
            int(row["step"]),
            steps,
        ),
    )
    return DistillationResult(steps, compare_with_source(source, model, text.held_out_batches()))
