"""Image sets of every kind from real files; errors name broken files."""

import gzip
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tokenformer.data.image_formats import cifar_images, read_idx
from tokenformer.data.image_sources import FASHION, load_images, load_test_images
from tokenformer.data.images import ArrayImages, DatasetImages, FileImages, decode_file
from tokenformer.errors import DataError


def write_tree(folder: Path, *, splits: tuple[str, ...] = ("train", "val")) -> None:
    """Write two classes, red and blue, of images of different sizes and formats."""
    for split in splits:
        for name, color in (("blue", (0, 0, 255)), ("red", (255, 0, 0))):
            home = folder / split / name
            home.mkdir(parents=True)
            for number, suffix in enumerate(("png", "JPEG", "bmp")):
                size = (10 + number, 8)
                Image.new("RGB", size, color).save(home / f"{number}.{suffix}")
            (home / "notes.txt").write_text("not an image")


def write_idx(path: Path, array: np.ndarray, *, zipped: bool = False) -> None:
    data = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    data += array.astype(np.uint8).tobytes()
    path.write_bytes(gzip.compress(data) if zipped else data)


def test_a_tree_of_images(tmp_path: Path) -> None:
    write_tree(tmp_path)
    splits = load_images(str(tmp_path))
    assert splits.classes == ["blue", "red"]
    assert len(splits.train) == len(splits.held_out) == 6
    pixels, label = splits.train.picture(0)
    assert (pixels.shape, label) == ((8, 10, 3), 0)
    assert (pixels == (0, 0, 255)).all()
    pixels, label = splits.train.picture(4)  # a JPEG, nearly red
    assert label == 1
    assert np.abs(pixels.astype(int) - (255, 0, 0)).max() < 5


@pytest.mark.parametrize("suffix", ["png", "tif", "pgm"])
def test_grey_images_of_16_bits_keep_their_shades(tmp_path: Path, suffix: str) -> None:
    shades = np.arange(0, 65536, 257, dtype=np.uint16).reshape(16, 16)
    Image.fromarray(shades).save(tmp_path / f"deep.{suffix}")
    pixels = decode_file(tmp_path / f"deep.{suffix}")
    assert pixels.shape == (16, 16, 1)
    assert pixels.ravel().tolist() == list(range(256))


def test_photographs_are_turned_upright(tmp_path: Path) -> None:
    lying = np.zeros((8, 24, 3), np.uint8)
    lying[:, :12] = 255  # its left half is bright: the top, once it stands
    turn_clockwise = Image.Exif()
    turn_clockwise[0x0112] = 6
    Image.fromarray(lying).save(tmp_path / "photo.png", exif=turn_clockwise)
    pixels = decode_file(tmp_path / "photo.png")
    assert pixels.shape == (24, 8, 3)
    assert (pixels[:12] == 255).all()
    assert (pixels[12:] == 0).all()


def save_large(path: Path, mode: str, size: tuple[int, int]) -> np.ndarray:
    """A gradient across the width, bright in its lower half; its shades in one channel."""
    shades = np.tile(np.linspace(0, 120, size[0]).astype(np.uint8), (size[1], 1))
    shades[size[1] // 2 :] += 120
    image = Image.fromarray(shades).convert(mode)
    if mode == "I;16":
        image = Image.fromarray(shades.astype(np.uint16) * 256)
    image.save(path, quality=95)
    return shades


@pytest.mark.parametrize(
    ("mode", "suffix"),
    [("L", "png"), ("RGB", "jpg"), ("RGB", "png"), ("P", "png"), ("I;16", "png"), ("RGBA", "png")],
)
def test_large_images_are_reduced(tmp_path: Path, monkeypatch, mode: str, suffix: str) -> None:
    """Large images of every mode are downscaled by an integer factor, as by averaging."""
    monkeypatch.setattr("tokenformer.data.images.MAX_PIXELS", 10_000)
    monkeypatch.setattr("tokenformer.data.images.STRIP_ROWS", 7)
    shades = save_large(tmp_path / f"large.{suffix}", mode, (403, 200))  # eight times too large
    pixels = decode_file(tmp_path / f"large.{suffix}")
    assert pixels.dtype == np.uint8
    gray = mode in ("L", "I;16")
    factor = {"jpg": 4}.get(suffix, 3)  # a JPEG has only powers of two
    assert pixels.shape[:2] == (-(-200 // factor), -(-403 // factor))
    assert pixels.shape[2] == (1 if gray else 3)
    side = 200 // factor
    whole = shades[: side * factor, : (403 // factor) * factor]
    means = whole.reshape(side, factor, 403 // factor, factor).mean((1, 3))
    assert np.abs(pixels[:side, : 403 // factor, 0] - means).max() < 8


def test_a_large_photograph_is_turned_upright(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("tokenformer.data.images.MAX_PIXELS", 10_000)
    lying = np.zeros((200, 400, 3), np.uint8)
    lying[:, :200] = 255
    turn_clockwise = Image.Exif()
    turn_clockwise[0x0112] = 6
    Image.fromarray(lying).save(tmp_path / "photo.jpg", exif=turn_clockwise)
    pixels = decode_file(tmp_path / "photo.jpg")
    assert pixels.shape == (100, 50, 3)
    assert (pixels[:45] > 250).all()
    assert (pixels[55:] < 5).all()


# The high-water mark is set back first: it begins at that of the process that started this one.
BOMB = """
import sys
from pathlib import Path
from PIL import Image, PngImagePlugin
from tokenformer.errors import DataError
from tokenformer.data.images import decode_file

def kilobytes(name):
    return int(Path("/proc/self/status").read_text().partition(name + ":")[2].split()[0])

Path("/proc/self/clear_refs").write_text("5")
before = kilobytes("VmRSS")
try:
    print(decode_file(Path(sys.argv[1])).shape)
except DataError as error:
    print(error)
print(kilobytes("VmHWM") - before)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux tells the peak")
@pytest.mark.parametrize(
    ("side", "message", "most"),
    [(12_000, "has 12000 x 12000 pixels, more than the limit of 89,478,485", 30_000),
     (9_000, "(3000, 3000, 1)", 150_000)],
)  # fmt: skip
def test_the_memory_of_a_huge_image_is_bounded(
    tmp_path: Path, side: int, message: str, most: int
) -> None:
    """1 bit a pixel on disk and 8 in memory: 81 MB once, and none of what is refused."""
    Image.new("1", (side, side), 1).save(tmp_path / "huge.png")
    command = [sys.executable, "-c", BOMB, str(tmp_path / "huge.png")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    answer, kilobytes = done.stdout.splitlines()
    assert message in answer
    assert int(kilobytes) < most
    assert done.stderr == ""


def test_held_out_images_alone_are_measured_but_not_trained_on(tmp_path: Path) -> None:
    write_tree(tmp_path, splits=("val",))
    pictures, split = load_test_images(str(tmp_path))
    assert (len(pictures), pictures.classes, split) == (6, ["blue", "red"], "val")
    with pytest.raises(DataError, match="has no split `train`; it has val"):
        load_images(str(tmp_path))


def test_a_tree_without_splits_is_divided_the_same_way_always(tmp_path: Path) -> None:
    write_tree(tmp_path, splits=(".",))
    one, two = (load_images(str(tmp_path), held_out_share=0.34) for _ in range(2))
    assert one.train.indices == two.train.indices
    assert len(one.held_out) == 2
    assert sorted([*one.train.indices, *one.held_out.indices]) == list(range(6))


def test_other_classes_in_the_held_out_split_are_refused(tmp_path: Path) -> None:
    write_tree(tmp_path)
    (tmp_path / "val" / "red").rename(tmp_path / "val" / "green")
    with pytest.raises(DataError, match="val has other classes than train: green, red"):
        load_images(str(tmp_path))


def test_hidden_files_and_folders_are_no_images(tmp_path: Path) -> None:
    write_tree(tmp_path, splits=("val",))
    for place in (".cache/1.png", "val/.ipynb_checkpoints/1.png", "val/red/._1.png",
                  "val/red/.thumbnails/1.png", "val/red/folder.png/more/1.png"):  # fmt: skip
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4)).save(tmp_path / place)
    pictures, split = load_test_images(str(tmp_path))
    assert (len(pictures), pictures.classes, split) == (7, ["blue", "red"], "val")
    assert pictures.picture(6)[0].shape == (4, 4, 3)


def test_broken_images_are_named_or_skipped(tmp_path: Path, caplog) -> None:
    write_tree(tmp_path)
    broken = tmp_path / "train" / "blue" / "1.JPEG"
    broken.write_bytes(broken.read_bytes()[:200])
    (tmp_path / "train" / "blue" / "2.bmp").write_text("<html>404</html>")
    refusing = load_images(str(tmp_path)).train
    refusing.picture(0)
    for place, name in ((1, "1.JPEG"), (2, "2.bmp")):
        with pytest.raises(DataError, match=f"{name} cannot be read as an image"):
            refusing.picture(place)
    skipping = load_images(str(tmp_path), on_corrupt="skip").train
    pixels, label = skipping.picture(1)  # the next that can be read, and its class
    assert label == 1
    assert (pixels == refusing.picture(3)[0]).all()
    skipping.picture(2)
    assert {path.name for path in skipping.skipped} == {"1.JPEG", "2.bmp"}
    for name in ("1.JPEG", "2.bmp"):
        message = [line for line in caplog.messages if f"{name} cannot be read as an image" in line]
        assert len(message) == 1
    with pytest.raises(DataError, match="on_corrupt='ignore' is unknown; choose refuse or skip"):
        load_images(str(tmp_path), on_corrupt="ignore")


def test_a_photograph_with_broken_metadata_is_named(tmp_path: Path) -> None:
    """Pillow reads a text in place of a number, and fails when it writes it."""
    exif = Image.Exif()
    exif[0x0112], exif[0x0131] = 6, "software"
    Image.new("RGB", (8, 8)).save(file := tmp_path / "turned.jpeg", exif=exif)
    as_width = file.read_bytes().replace(b"\x01\x31\x00\x02", b"\x01\x00\x00\x02")
    file.write_bytes(as_width)
    with pytest.raises(DataError, match=r"turned\.jpeg cannot be read as an image"):
        decode_file(file)


def test_a_tree_without_a_readable_image_does_not_loop_for_ever(tmp_path: Path) -> None:
    home = tmp_path / "train" / "a"
    home.mkdir(parents=True)
    (home / "x.png").write_text("no")
    pictures = FileImages([home / "x.png"], [0], ["a"], "skip")
    with pytest.raises(DataError, match=r"x.png and all images after it cannot be read"):
        pictures.picture(0)


def test_fashion_mnist(real_data) -> None:
    splits = load_images(str(real_data("image/fashion-mnist")))
    assert (len(splits.train), len(splits.held_out)) == (60_000, 10_000)
    assert splits.classes == FASHION
    pixels, label = splits.held_out.picture(0)
    assert pixels.shape == (28, 28, 1)
    assert splits.classes[label] == "Ankle boot"  # as its authors print the first test image
    assert np.bincount(splits.train.labels).tolist() == [6000] * 10


@pytest.mark.parametrize("zipped", [False, True])
def test_idx_files_are_read_and_torn_ones_refused(tmp_path: Path, zipped: bool) -> None:
    path = tmp_path / "train-images-idx3-ubyte"
    array = np.arange(24).reshape(2, 3, 4)
    write_idx(path, array, zipped=zipped)
    assert (read_idx(path) == array).all()
    data = path.read_bytes()
    path.write_bytes(data[:-3])
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte (is truncated|cannot be read)"):
        read_idx(path)
    path.write_bytes(b"PK\3\4" + data)
    with pytest.raises(DataError, match="is not an IDX file of bytes: it begins with 504b0304"):
        read_idx(path)
    with pytest.raises(DataError, match="lacks the images or the labels of train"):
        load_images(str(tmp_path))


def test_idx_files_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    for prefix, labels in (("train", [0, 1, 1]), ("t10k", [0, 1, 2])):
        write_idx(tmp_path / f"{prefix}-images-idx3-ubyte", np.zeros((3, 2, 2)))
        write_idx(tmp_path / f"{prefix}-labels-idx1-ubyte", np.array(labels))
    with pytest.raises(DataError, match="has other classes in test than in train"):
        load_images(str(tmp_path))
    write_idx(tmp_path / "t10k-labels-idx1-ubyte", np.array([0, 0, 0]))
    assert load_images(str(tmp_path)).classes == ["0", "1"]
    write_idx(tmp_path / "t10k-labels-idx1-ubyte", np.array([0, 0]))
    with pytest.raises(DataError, match=r"images-idx3-ubyte has 3 images, .*-ubyte has 2 labels"):
        load_images(str(tmp_path))


@pytest.mark.parametrize("classes", [10, 100])
def test_cifar_files(tmp_path: Path, classes: int) -> None:
    random = np.random.default_rng(0)
    planes = random.integers(256, size=(6, 3, 32, 32), dtype=np.uint8)
    labels = random.integers(classes, size=6, dtype=np.uint8)
    before = [labels[:, None] // 5] if classes == 100 else []
    records = np.concatenate([*before, labels[:, None], planes.reshape(6, -1)], axis=1)
    records = records.astype(np.uint8)
    names = [f"class-{i}" for i in range(classes)]
    if classes == 10:
        (tmp_path / "batches.meta.txt").write_text("\n".join(names))
        (tmp_path / "data_batch_1.bin").write_bytes(records[:2].tobytes())
        (tmp_path / "data_batch_2.bin").write_bytes(records[2:4].tobytes())
        (tmp_path / "test_batch.bin").write_bytes(records[4:].tobytes())
    else:
        (tmp_path / "fine_label_names.txt").write_text("\n".join(names))
        (tmp_path / "train.bin").write_bytes(records[:4].tobytes())
        (tmp_path / "test.bin").write_bytes(records[4:].tobytes())
    splits = load_images(str(tmp_path))
    assert (len(splits.train), len(splits.held_out)) == (4, 2)
    assert splits.classes == names
    pixels, label = splits.train.picture(3)
    assert label == labels[3]
    assert (pixels == planes[3].transpose(1, 2, 0)).all()
    (tmp_path / "x.bin").write_bytes(b"1234567")
    with pytest.raises(DataError, match=r"is truncated: 7 bytes"):
        cifar_images([tmp_path / "x.bin"], names)


def test_saved_datasets(tmp_path: Path) -> None:
    import datasets

    features = datasets.Features(
        {"id": datasets.Value("int64"), "img": datasets.Image(),
         "kind": datasets.ClassLabel(names=["dark", "light"])}
    )  # fmt: skip
    rows = {
        "id": [1, 2, 3, 4],
        "img": [Image.new("L", (6, 5), shade) for shade in (0, 250, 10, 240)],
        "kind": [0, 1, 0, 1],
    }
    saved = datasets.Dataset.from_dict(rows, features=features)
    datasets.DatasetDict({"train": saved, "test": saved.select([3])}).save_to_disk(tmp_path)
    splits = load_images(str(tmp_path))
    assert splits.classes == ["dark", "light"]
    pixels, label = splits.held_out.picture(0)
    assert (pixels.shape, label, int(pixels.mean())) == ((5, 6, 1), 1, 240)


def test_datasets_with_gaps(tmp_path: Path) -> None:
    import datasets

    def saved(name: str, labels: list, kind: object) -> str:
        pictures = [None, *(Image.new("L", (6, 5), shade) for shade in (250, 10))]
        features = datasets.Features({"image": datasets.Image(), "label": kind})
        rows = datasets.Dataset.from_dict({"image": pictures, "label": labels}, features=features)
        datasets.DatasetDict({"train": rows, "test": rows}).save_to_disk(tmp_path / name)
        return str(tmp_path / name)

    kind = datasets.ClassLabel(names=["dark", "light"])
    gaps = saved("gaps", [0, 1, -1], kind)
    with pytest.raises(DataError, match="row 0 cannot be read as an image: it is missing"):
        load_images(gaps).train.picture(0)
    skipping = load_images(gaps, on_corrupt="skip").train
    assert skipping.picture(0)[1] == 1
    with pytest.raises(DataError, match="row 2 has the label -1, which is not a class"):
        skipping.picture(2)
    with pytest.raises(DataError, match="row 2 has the label None, which is not a class"):
        load_images(saved("none", [0, 1, None], kind)).train.picture(2)
    with pytest.raises(DataError, match=r"column label has dtype string.*class_encode_column"):
        load_images(saved("words", ["a", "b", "a"], datasets.Value("string")))


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_huge_images_of_datasets_are_refused_before_they_are_decoded(tmp_path: Path) -> None:
    import datasets

    Image.new("1", (12_000, 12_000)).save(tmp_path / "huge.png")
    pictures = [{"bytes": (tmp_path / "huge.png").read_bytes(), "path": None}]
    Image.new("L", (6, 5), 77).save(tmp_path / "small.png")
    pictures.append({"bytes": None, "path": str(tmp_path / "small.png")})
    for mode in (None, "RGB"):
        features = datasets.Features(
            {"image": datasets.Image(mode=mode), "label": datasets.ClassLabel(names=["a"])}
        )
        rows = datasets.Dataset.from_dict({"image": pictures, "label": [0, 0]}, features=features)
        pictures_of = DatasetImages(rows, "image", "label")
        with pytest.raises(DataError, match=r"row 0 .*12000 x 12000 pixels, more than the limit"):
            pictures_of.picture(0)
        pixels, _ = pictures_of.picture(1)
        assert pixels.shape == (5, 6, 1 if mode is None else 3)
        assert (pixels == 77).all()


def test_digits_need_no_download():
    splits = load_images("digits")
    assert (len(splits.train), len(splits.held_out)) == (1617, 180)
    pixels, _ = splits.train.picture(0)
    assert pixels.shape == (8, 8, 1)
    assert splits.train.whole.pixels.max() == 255
    assert len(splits.classes) == 10


def test_a_mistyped_folder_is_refused_at_once(tmp_path: Path, monkeypatch) -> None:
    """Without a request to the hub."""
    (tmp_path / "pictures").mkdir()
    (tmp_path / "file").write_text("text")
    monkeypatch.chdir(tmp_path)
    for name, message in (
        ("./picturs", "did you mean pictures"),
        (str(tmp_path / "picturs"), f"did you mean {tmp_path / 'pictures'}"),
        ("pictures/train", "no pictures/train"),
        ("./file", "it is a file"),
        ("no/where/here", "no no/where/here"),
    ):
        with pytest.raises(DataError, match="neither a folder nor a dataset: .*" + message):
            load_images(name)


def test_a_folder_without_images_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no images: no IDX or CIFAR"):
        load_images(str(tmp_path))
    with pytest.raises(DataError, match="3 images have 2 labels"):
        ArrayImages(np.zeros((3, 2, 2, 1), np.uint8), np.zeros(2))
    with pytest.raises(DataError, match="a label is 7, but there are 2 classes"):
        ArrayImages(np.zeros((1, 2, 2, 1), np.uint8), np.array([7]), ["a", "b"])
