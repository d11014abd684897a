"""The model card (README.md) of a saved folder: what the model is, how to load it, its history.

A card ends with a comment that contains the hash of its text. An edited card no longer matches it
and is never overwritten. The front matter is not part of the hash: additions by a user or the hub
(a license, datasets) are kept.
"""

import hashlib
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenformer.models.accounting import count_parameters
from tokenformer.models.block_configuration import STUB_MODULE
from tokenformer.models.configuration import (
    PROJECTIONS,
    LanguageConfig,
    MatrixConfig,
    TokenConfig,
    VisionConfig,
)
from tokenformer.models.image_text_configuration import TokenformerImageTextConfig

AnyConfig = LanguageConfig | VisionConfig
CARD = "README.md"
STUB = f"{STUB_MODULE}.py"
HISTORY = "## History"
MARK = re.compile(r"<!-- tokenformer card, sha256 ([0-9a-f]{64});.*-->\s*\Z", re.DOTALL)
TEMPLATE = "This model card has been automatically generated"
"""Text in the card that transformers uploads for a model without one."""
MAX_LAYERS = 12


def write_card(folder: Path, config: AnyConfig, history: Sequence[str] = ()) -> None:
    """Write README.md, unless it exists and was edited. `history` has a line for each step that led
    to the model: training, growth, conversion."""
    if is_edited(folder):
        return
    before = read(folder) or ""
    front = "" if TEMPLATE in before else split(before)[0]
    front = front or front_matter(config)
    text = f"{loading(config)}\n\n{architecture(config)}"
    if history:
        lines = [f"- {' '.join(line.split())}" for line in history]
        text += f"\n\n{HISTORY}\n\n" + "\n".join(lines)
    mark = f"<!-- tokenformer card, sha256 {digest(text)}; once edited it is never overwritten -->"
    (folder / CARD).write_text(f"{front}\n\n{text}\n\n{mark}\n", encoding="utf-8")


def is_edited(folder: Path) -> bool:
    """Whether the folder has a card that was edited after it was generated."""
    text = read(folder)
    if text is None or TEMPLATE in text:
        return False
    _, body = split(text)
    found = MARK.search(body)
    return found is None or digest(body[: found.start()]) != found[1]


def split(text: str) -> tuple[str, str]:
    """Split a card into its front matter, including the dashes or empty, and the rest."""
    found = re.match(r"---\n.*?\n---(?=\n|\Z)", text, re.DOTALL)
    return ("", text) if found is None else (found[0], text[found.end() :])


def digest(text: str) -> str:
    return hashlib.sha256(text.strip().encode()).hexdigest()


def read_history(folder: Path) -> list[str]:
    """Return the history in one of our cards, edited or not."""
    text = read(folder) or ""
    _, _, after = (text if MARK.search(text) else "").partition(f"\n{HISTORY}\n")
    section = re.split(r"\n#|\n<!--", after, maxsplit=1)[0]
    return [line[2:].strip() for line in section.splitlines() if line.startswith("- ")]


def read(folder: Path) -> str | None:
    try:
        return (folder / CARD).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def public_name(name: str | Path) -> str:
    """Return the name of a model or corpus for a card: a hub name, or the last part of a path."""
    path = Path(name)
    if not path.exists():
        return str(name) if len(path.parts) <= 2 and not path.is_absolute() else path.name
    path = path.resolve()
    return path.parent.name if path.name == "model" else path.name


def front_matter(config: AnyConfig) -> str:
    tags = ["tokenformer", "pattention" if isinstance(config, TokenConfig) else "transformer"]
    return "\n".join(
        [
            "---",
            "library_name: tokenformer",
            f"pipeline_tag: {task(config)[0]}",
            "tags:",
            *(f"- {tag}" for tag in tags),
            "# license: add the license that you publish the model under",
            "---",
        ]
    )


def task(config: AnyConfig) -> tuple[str, str, str, str]:
    """Return the pipeline, the Auto class, the class of its processor, and what the model is."""
    if not has_head(config):
        return "feature-extraction", "AutoModel", "", "model without a head"
    if isinstance(config, TokenformerImageTextConfig):
        kind = "vision-language model"
        return "image-text-to-text", "AutoModelForImageTextToText", "AutoProcessor", kind
    if isinstance(config, LanguageConfig):
        return "text-generation", "AutoModelForCausalLM", "AutoTokenizer", "language model"
    processor = "AutoImageProcessor"
    return "image-classification", "AutoModelForImageClassification", processor, "image classifier"


def has_head(config: AnyConfig) -> bool:
    return not config.architectures or "For" in config.architectures[0]


def loading(config: AnyConfig) -> str:
    _, auto_class, reader, kind = task(config)
    family = "TokenFormer" if isinstance(config, TokenConfig) else "Transformer"
    classes = ", ".join(filter(None, (auto_class, reader)))
    lines = [f'model = {auto_class}.from_pretrained("THIS_FOLDER")']
    if reader:
        name = "tokenizer" if reader == "AutoTokenizer" else "processor"
        lines.append(f'{name} = {reader}.from_pretrained("THIS_FOLDER")')
    return "\n".join(
        [
            f"# {family} {kind}",
            "",
            "This model needs the `tokenformer` package, from its repository or a wheel. Import it",
            "before you load the model:",
            "",
            "```python",
            "import tokenformer  # registers the model with transformers",
            f"from transformers import {classes}",
            "",
            *lines,
            "```",
            "",
            "Where you cannot add an import, as in lm-eval, pass `trust_remote_code=True`: it runs",
            f"`{STUB}`, which does nothing but import the package.",
        ]
    )


def architecture(config: AnyConfig) -> str:
    rows = {
        "class": (config.architectures or [type(config).__name__])[0],
        "parameters": f"{sum(count_parameters(config).values()):,}",
        "layers": f"{config.num_hidden_layers:,}",
        "hidden size": f"{config.hidden_size:,}",
        "attention heads": f"{config.num_attention_heads:,}",
    }
    if isinstance(config, TokenConfig):
        names = ["q", "k", "v", "output", "feed-forward"]
        layers = range(config.num_hidden_layers)
        for name, projection in zip(names, PROJECTIONS, strict=True):
            counts = spread(config.tokens(projection, layer) for layer in layers)
            rows[f"parameter tokens per layer, {name}"] = counts
    elif isinstance(config, MatrixConfig):
        rows["hidden units of the MLP"] = f"{config.intermediate_size:,}"
    if isinstance(config, LanguageConfig):
        rows["context length"] = f"{config.max_position_embeddings:,}"
        rows["vocabulary"] = f"{config.vocab_size:,}"
        if isinstance(config, TokenformerImageTextConfig):
            vision = config.vision_config
            rows["image size, patch size"] = f"{vision.image_size}, {vision.patch_size}"
            rows["tokens of images and text"] = config.mode
    else:
        rows["image size, patch size"] = f"{config.image_size}, {config.patch_size}"
        rows["classes"] = f"{config.num_labels:,}"
    rows["dtype"] = str(config.dtype).removeprefix("torch.")
    if quantization := getattr(config, "quantization_config", None):
        found = quantization if isinstance(quantization, dict) else quantization.to_dict()
        tokens = "4-bit" if found.get("bits") == 4 else "int8"
        rows["quantization"] = f"{tokens} parameter tokens, int8 embeddings"
    cells = [f"| {name} | {value} |" for name, value in rows.items()]
    return "\n".join(["## Architecture", "", "| | |", "|---|---|", *cells])


def spread(counts: Iterable[int]) -> str:
    """Format token counts: one number if all layers agree, else one per layer."""
    found = [f"{count:,}" for count in counts]
    if len(set(found)) == 1:
        return found[0]
    more = ", ..." if len(found) > MAX_LAYERS else ""
    return "; ".join(found[:MAX_LAYERS]) + more
