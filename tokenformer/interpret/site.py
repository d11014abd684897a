"""The static site of a model: what each token does, as pages that open from disk.

    write_site(folder, data, examples)

The folder gets `index.html` with its scripts and style, and the data in pieces (`site_data.py`).
Nothing is loaded from the network.
"""

import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from torch import Tensor

from tokenformer.interpret.score_map import ScoreMaps
from tokenformer.interpret.site_data import SiteData, script

PAGE = Path(__file__).with_name("page")
"""The page itself: HTML, style and scripts."""
DATA = "data"
Example = tuple[ScoreMaps, Tensor, Mapping[str, Tensor] | None]
"""Score maps of a batch of inputs, the logits and, of texts, the direct effects on the most likely
ones."""


def write_site(
    folder: Path,
    data: SiteData,
    examples: Iterable[Example] = (),
    on_piece: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Write the site to an empty folder.

    Args:
        folder: an existing folder.
        data: the pieces of the index.
        examples: inputs with a score map of their own.
        on_piece: called with the number of layers that are written and of all.
    """
    for path in PAGE.iterdir():
        shutil.copyfile(path, folder / path.name)
    pieces = folder / DATA
    pieces.mkdir()

    def write(name: str, value: object) -> None:
        (pieces / f"{name}.js").write_text(script(name, value), encoding="ascii")

    count = 0
    for maps, logits, effects in examples:
        for sample in range(len(maps.inputs)):
            write(f"example-{count}", data.example(maps, sample, logits, effects))
            count += 1
    layers = data.index.layers
    for done, name in enumerate(layers, 1):
        write(f"table-{name}", data.table(name))
        for number, chunk in enumerate(data.details(name)):
            write(f"tokens-{name}-{number}", chunk)
        on_piece(done, len(layers))
    if not data.is_text:
        for number, images in enumerate(data.images()):
            write(f"images-{number}", images)
    write("site", data.overview(count))
    write("live", None)  # `tokenformer explore --serve` answers with its own
