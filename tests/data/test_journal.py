"""Resuming an interrupted preparation, only if nothing has changed since."""

import json
import os
import shlex
import shutil
import signal
import subprocess

import pytest
from datasets import Dataset

from tokenformer.data.corpus import Corpus
from tokenformer.data.preparation import PrepareOptions, prepare
from tokenformer.data.sources import find_sources
from tokenformer.data.text_encoding import ReadOptions
from tokenformer.errors import DataError


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Sync after every chunk of 2,000 bytes."""
    monkeypatch.setattr("tokenformer.data.corpus_reader.CHUNK_BYTES", 2000)
    monkeypatch.setattr("tokenformer.data.documents.BLOCK_BYTES", 1000)
    monkeypatch.setattr("tokenformer.data.preparation.SYNC_SECONDS", 0.0)


def stop_after(chunks: int):
    left = iter(range(chunks))

    def stop(progress):
        if next(left, None) is None:
            raise KeyboardInterrupt

    return stop


def interrupted(corpus, out) -> dict:
    with pytest.raises(KeyboardInterrupt):
        prepare(PrepareOptions(str(corpus)), out, on_progress=stop_after(2))
    journal = json.loads((out / "unfinished.json").read_text())
    assert journal["position"]
    return journal


@pytest.mark.parametrize("kind", ["text", "rows", "folder", "dataset"])
def test_a_source_edited_since_with_the_same_size_is_refused(tmp_path, kind):
    lines = [f"the line of number {number:06d}\n" for number in range(10_000)]
    corpus, out = tmp_path / "corpus", tmp_path / "out"
    file = corpus / "a.txt"
    corpus.mkdir()
    if kind == "dataset":
        Dataset.from_dict({"text": lines[:500]}).save_to_disk(corpus)
        name, file = f"datasets:{corpus}", next(corpus.glob("*.arrow"))
    else:
        if kind == "rows":
            file, lines = corpus / "a.jsonl", [json.dumps({"text": x}) + "\n" for x in lines]
        file.write_text("".join(lines))
        if kind == "folder":
            (corpus / "b.txt").write_text("another")
        name = str(corpus) if kind == "folder" else str(file)
    interrupted(name, out)
    content, before = file.read_bytes(), file.stat()
    place = len(content) // 3  # outside of the samples at start, middle and end
    file.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    with pytest.raises(DataError, match=r"modified after .* was started.* remove .* run the com"):
        prepare(PrepareOptions(name), out)
    file.write_bytes(content)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    prepare(PrepareOptions(name), out)
    Corpus(out).verify()


def test_a_source_edited_while_it_is_read_is_refused(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("a line of text\n" * 1000)

    def edit(progress):
        file.write_text("A line of text\n" * 1000)
        os.utime(file, ns=(0, 0))

    with pytest.raises(DataError, match=r"a.txt was modified after"):
        prepare(PrepareOptions(str(file)), tmp_path / "out", on_progress=edit)
    with pytest.raises(DataError, match="is not finished"):
        Corpus(tmp_path / "out")


def test_a_small_source_that_was_only_touched_is_accepted(tmp_path):
    file, out, messages = tmp_path / "a.txt", tmp_path / "out", []
    file.write_text("a line of text\n" * 1000)
    interrupted(file, out)
    os.utime(file, ns=(0, 0))
    prepare(PrepareOptions(str(file)), out, on_progress=lambda progress: os.utime(file, ns=(1, 1)))
    Corpus(out).verify()
    prepare(PrepareOptions(str(file)), out, on_message=messages.append)
    assert messages == [f"{out} is already prepared"]


def test_the_error_for_a_touched_large_source_says_how_to_resume(tmp_path):
    file, out = tmp_path / "a b.txt", tmp_path / "out"
    file.write_text("a line of text\n" * 20_000)
    interrupted(file, out)
    os.utime(file, ns=(0, 0))
    with pytest.raises(DataError, match="if its content is the same") as error:
        prepare(PrepareOptions(str(file)), out)
    command = str(error.value).split("`")[1]
    subprocess.run(shlex.split(command), check=True, timeout=60)
    prepare(PrepareOptions(str(file)), out)
    Corpus(out).verify()


def test_a_finished_corpus_reports_a_source_edited_since(tmp_path):
    file, out, messages = tmp_path / "a.txt", tmp_path / "out", []
    content = bytearray(b"a line of text\n" * 20_000)
    file.write_bytes(content)
    index = prepare(PrepareOptions(str(file)), out)
    content[len(content) // 3] ^= 1  # outside of the samples at start, middle and end
    file.write_bytes(content)
    os.utime(file, ns=(0, 0))
    assert prepare(PrepareOptions(str(file)), out, on_message=messages.append) == index
    modified = f"a.txt was modified after {out} was prepared; remove {out} to prepare it again"
    assert messages == [f"{out} is already prepared", modified]


def test_an_unreadable_source_is_an_error_and_leaves_no_folder(tmp_path, monkeypatch):
    file, out = tmp_path / "a.txt", tmp_path / "out"
    file.write_text("a line of text\n" * 1000)

    def found_then_deleted(*args):
        sources = find_sources(*args)
        file.unlink()
        return sources

    with monkeypatch.context() as patch:
        patch.setattr("tokenformer.data.preparation.find_sources", found_then_deleted)
        with pytest.raises(DataError, match=r"^a.txt cannot be read.*No such file"):
            prepare(PrepareOptions(str(file)), out)
    assert not out.exists()
    file.write_text("a line of text\n" * 1000)
    with pytest.raises(DataError, match=r"^a.txt cannot be read.*No such file"):
        prepare(PrepareOptions(str(file)), out, on_progress=lambda _: file.unlink(missing_ok=True))


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_a_journal_of_an_older_version_with_a_byte_order_mark_is_refused(tmp_path, encoding):
    file, out = tmp_path / "a.txt", tmp_path / "out"
    file.write_text("a line of text\n" * 1000, encoding=encoding)
    journal = interrupted(file, out)
    del journal["stamps"]
    (out / "unfinished.json").write_text(json.dumps(journal))
    with pytest.raises(DataError, match=r"a.txt has a byte order mark.*; remove .*/out and run"):
        prepare(PrepareOptions(str(file)), out)


def test_a_changed_encoding_needs_the_folder_removed(tmp_path):
    file, out = tmp_path / "a.txt", tmp_path / "out"
    file.write_bytes(b"a line of text\n" * 1000 + b"\xe9")
    with pytest.raises(DataError, match=r"--encoding .*/out holds .*remove it first"):
        prepare(PrepareOptions(str(file)), out)
    latin = PrepareOptions(str(file), read_options=ReadOptions("latin-1"))
    message = r"was made with --encoding utf-8, not latin-1; remove .*/out first and run"
    with pytest.raises(DataError, match=message):
        prepare(latin, out)
    shutil.rmtree(out)
    prepare(latin, out)
    with pytest.raises(DataError, match="latin-1, not utf-8; use a new folder or remove it"):
        prepare(PrepareOptions(str(file)), out)


def test_the_default_encoding_can_be_given_explicitly(tmp_path):
    file, out = tmp_path / "a.txt", tmp_path / "out"
    file.write_text("a line of text\n" * 1000)
    index = prepare(PrepareOptions(str(file)), out)
    assert prepare(PrepareOptions(str(file), read_options=ReadOptions("utf-8")), out) == index


def test_a_changed_size_is_an_error_that_names_the_file(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("a line of text\n" * 1000)
    interrupted(file, tmp_path / "out")
    file.write_text("a line of text\n" * 999)
    with pytest.raises(DataError, match=r"holds another corpus, or a.txt has changed"):
        prepare(PrepareOptions(str(file)), tmp_path / "out")


def test_a_journal_of_an_older_version_is_resumed(tmp_path):
    file, out = tmp_path / "a.txt", tmp_path / "out"
    file.write_text("a line of text\n" * 1000)
    journal = interrupted(file, out)
    for name in ("stamps", "parts"):
        del journal[name]
    for name in ("encoding", "encoding_errors"):
        del journal["settings"][name]
    journal["parts"] = [["train", 14_250], ["validation", None]]
    (out / "unfinished.json").write_text(json.dumps(journal))
    prepare(PrepareOptions(str(file)), out)
    assert Corpus(out).split("validation").bytes == 750


def test_a_corpus_of_an_older_version_counts_as_finished(tmp_path):
    file, out, messages = tmp_path / "a.txt", tmp_path / "out", []
    file.write_text("a line of text\n" * 100)
    index = prepare(PrepareOptions(str(file)), out)
    for name in ("encoding", "encoding_errors"):
        del index["settings"][name]
    (out / "index.json").write_text(json.dumps(index))
    assert prepare(PrepareOptions(str(file)), out, on_message=messages.append) == index
    assert messages == [f"{out} is already prepared"]


@pytest.mark.parametrize(
    "alter",
    [
        lambda journal: journal.pop("settings"),
        lambda journal: journal.update(position=[1]),
        lambda journal: journal.update(position="start"),
        lambda journal: journal.update(split="other"),
        lambda journal: journal.update(splits=[]),
        lambda journal: journal.update(parts=[1]),
        lambda journal: journal.update(tokenizer=1),
        lambda journal: journal.update(stamps=[1]),
        lambda journal: journal["splits"].update({"../x": {}}),
        lambda journal: journal["splits"]["train"].update(open_tokens="5"),
        lambda journal: journal["splits"]["train"].update(shards=[{"file": "../x"}]),
    ],
)
def test_a_damaged_journal_is_an_error(tmp_path, alter):
    file, out = tmp_path / "a.txt", tmp_path / "out"
    file.write_text("a line of text\n" * 1000)
    journal = interrupted(file, out)
    alter(journal)
    for text in (json.dumps(journal), "{torn", "null"):
        (out / "unfinished.json").write_text(text)
        with pytest.raises(DataError, match=r"unfinished.json is damaged: .*; remove .*/out"):
            prepare(PrepareOptions(str(file)), out)
        assert (out / "unfinished.json").read_text() == text, "nothing is deleted"


class InterruptedInDel:
    """Ctrl-C arrives in its `__del__`, where Python ignores exceptions."""

    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1000):  # bytecodes, so that the signal is handled here
            pass


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("chunk", [0, 3, -1])
def test_an_interrupt_that_python_ignores_is_not_lost(tmp_path, chunk):
    file, out = tmp_path / "a.txt", tmp_path / "out"
    file.write_text("a line of text\n" * 1000)
    calls, seen = iter(range(1000)), []

    def signalled(progress):
        seen.append(progress)
        if next(calls) == chunk or (chunk < 0 and progress.text_bytes == 15_000):
            victim = InterruptedInDel()
            del victim

    with pytest.raises(KeyboardInterrupt):
        prepare(PrepareOptions(str(file)), out, on_progress=signalled)
    assert chunk < 0 or len(seen) <= chunk + 2, "stops at the next chunk"
    assert not (out / "index.json").exists()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    prepare(PrepareOptions(str(file)), out)
    Corpus(out).verify()


def test_the_hashing_thread_is_reused(tmp_path):
    from tokenformer.data.shards import hash_executor

    (tmp_path / "a.txt").write_text("text\n" * 100)
    prepare(PrepareOptions(str(tmp_path / "a.txt")), tmp_path / "one")
    threads = set(hash_executor()._threads)
    prepare(PrepareOptions(str(tmp_path / "a.txt")), tmp_path / "two")
    assert len(threads) == 1
    assert set(hash_executor()._threads) == threads
    assert all(thread.is_alive() for thread in threads)
