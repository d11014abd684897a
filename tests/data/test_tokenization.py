"""Encoding in several processes: in order, with a limited number of chunks in flight."""

from pathlib import Path

import numpy as np

from tokenformer.data.tokenization import Chunk, TokenizerEncoder, encode_chunks
from tokenformer.data.tokenizer import load_tokenizer


def test_chunks_are_in_order_and_few_are_in_flight(tmp_path):
    load_tokenizer("bytes", None).save(tmp_path / "tokenizer")
    file: Path = tmp_path / "tokenizer" / "tokenizer.json"
    encoder = TokenizerEncoder(file, end_of_text=256, dtype=np.dtype("<u2"))
    read = 0

    def chunks():
        nonlocal read
        for number in range(100):
            read += 1
            chunk = Chunk(bytes_read=number)
            chunk.add(b"%d" % number * 50, True, "train" if number % 2 else "test")
            chunk.add(b"x", False, "train")
            yield chunk

    for number, (chunk, ids) in enumerate(encode_chunks(chunks(), encoder, workers=2)):
        assert chunk.bytes_read == number
        text = [*(b"%d" % number * 50), 256]
        if number % 2:
            assert ids["train"].tolist() == [*text, ord("x")]
        else:
            assert ids["test"].tolist() == text
            assert ids["train"].tolist() == [ord("x")]
        assert read <= number + 1 + 2 * 2
