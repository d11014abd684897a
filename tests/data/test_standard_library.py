import numpy as np

from tokenformer.data.byte_tokenizer import END_OF_TEXT
from tokenformer.data.standard_library import (
    HELD_OUT_EVERY,
    encode_documents,
    source_files,
    standard_library,
)


def test_documents_are_bytes_and_end_of_text():
    tokens = encode_documents([b"ab", b"", b"\xff"])
    assert tokens.tolist() == [97, 98, END_OF_TEXT, END_OF_TEXT, 255, END_OF_TEXT]
    assert tokens.dtype == np.uint16


def test_the_corpus_is_large_and_the_split_is_by_file():
    training, held_out = standard_library()
    assert len(training) > 4_000_000
    assert len(held_out) > 100_000
    files = (training == END_OF_TEXT).sum() + (held_out == END_OF_TEXT).sum()
    assert (held_out == END_OF_TEXT).sum() == -(-files // HELD_OUT_EVERY)


def test_installed_packages_and_tests_are_skipped(tmp_path):
    for name in ("a.py", "site-packages/b.py", "json/c.py", "test/d.py", "e.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    assert [str(f.relative_to(tmp_path)) for f in source_files(tmp_path)] == ["a.py", "json/c.py"]
