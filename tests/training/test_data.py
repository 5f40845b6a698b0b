"""Corpora, tokenizers, the token cache and packed sequences."""

from __future__ import annotations

import errno
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from transformers import AutoTokenizer

from mdn.models import MomentumDeltaNetForCausalLM
from mdn.training import tokens as token_cache
from mdn.training.build import model_config
from mdn.training.corpus import open_corpus, standard_library_files
from mdn.training.dataset import PackCollator, PackedSequences, prepare_data
from mdn.training.recipe import DataSettings, TokenizerSettings
from mdn.training.tokenizer import Encoder, prepare_tokenizer
from training_support import tiny_recipe, write_corpus


def documents(**settings) -> list[str]:
    data = DataSettings(source="files", **settings)
    return list(open_corpus(data, Path(data.cache_dir)).documents())


def test_text_lines_and_rows_become_documents(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "a.txt").write_text("one file")
    (folder / "b.jsonl").write_text('{"text": "first line"}\n\n{"text": null, "other": 1}\n')
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a row", None, "another"]}), folder / "c.parquet")
    (folder / "ignored.csv").write_text("no,text")
    found = documents(paths=(str(folder),), cache_dir=str(tmp_path / "cache"))
    assert found == ["one file", "first line", "", "a row", "", "another"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "bad.jsonl",
            '{"text": "good"}\n{"txt": 1}\n',
            r"bad\.jsonl, line 2: expected a JSON object with a text field 'text'",
        ),
        ("bad.jsonl", "{broken\n", r"bad\.jsonl, line 1: expected a JSON object"),
        ("bad.csv", "a,b", r"bad\.csv' is not one of \.txt, \.jsonl, \.parquet"),
    ],
)
def test_a_file_that_does_not_fit_is_an_error_that_names_it(
    tmp_path: Path, name: str, content: str, message: str
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        documents(paths=(str(tmp_path / name),), cache_dir=str(tmp_path / "cache"))


@pytest.mark.parametrize("values", [[1, 2], [b"bytes"], [["a"], ["list"]]])
def test_a_parquet_column_that_holds_no_text_is_named(tmp_path: Path, values: list[Any]) -> None:
    file = tmp_path / "numbers.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": values}), file)
    kind = type(values[0]).__name__
    with pytest.raises(ValueError, match=rf"numbers\.parquet: field 'text' holds {kind}, not text"):
        documents(paths=(str(file),), cache_dir=str(tmp_path / "cache"))


def test_a_missing_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no such file or folder: 'nowhere\.txt'"):
        documents(paths=("nowhere.txt",), cache_dir=str(tmp_path))


def test_the_standard_library_is_several_megabytes_of_sources_without_tests() -> None:
    files = standard_library_files()
    assert sum(path.stat().st_size for path in files) > 4e6
    assert not any({"test", "tests", "site-packages"} & set(path.parts) for path in files)


def test_byte_ids_are_the_bytes_and_the_saved_tokenizer_agrees(tmp_path: Path) -> None:
    directory = prepare_tokenizer(TokenizerSettings(kind="bytes"), "", tmp_path, lambda: iter(()))
    text = "naïve\n\tcode 🐍 \x00"
    expected = list(text.encode())
    assert Encoder(directory).encode([text])[0].tolist() == expected
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert tokenizer(text)["input_ids"] == expected
    assert tokenizer.decode(expected) == text
    assert tokenizer.eos_token_id == 256


@pytest.mark.parametrize("kind", ["bpe", "gpt2"])
def test_encoded_text_decodes_to_itself(tmp_path: Path, kind: str) -> None:
    texts = ["def f(x):\n    return x + 1\n" * 20, "Größe  🐍 and   spaces\t"]
    settings = TokenizerSettings(kind=kind, vocab_size=300)
    directory = prepare_tokenizer(settings, "corpus", tmp_path, lambda: iter(texts))
    encoder = Encoder(directory)
    for text, ids in zip(texts, encoder.encode(texts), strict=True):
        assert encoder.decode(ids).decode() == text
        assert AutoTokenizer.from_pretrained(directory)(text)["input_ids"] == ids.tolist()
    assert len(encoder.encode(texts)[0]) < len(texts[0])
    assert 257 < encoder.vocab_size <= (300 if kind == "bpe" else 50257)


def test_the_stream_is_every_training_document_with_an_end_before_and_after(tmp_path: Path) -> None:
    data = prepare_data(tiny_recipe(tmp_path))
    corpus = [path.read_bytes() for path in sorted((tmp_path / "corpus").iterdir())]
    table = data.cache.documents
    for stream, side in ((data.training, False), (data.held_out, True)):
        texts = [corpus[number] for number in stream.documents]
        assert all(table["held_out"][number] == side for number in stream.documents)
        expected = [256, *(token for text in texts for token in (*text, 256))]
        ids, beginnings = stream.read(0, len(stream))
        assert ids.tolist() == expected
        assert [ids[position] for position in beginnings] == [256] * len(texts)
    assert set(data.training.documents).isdisjoint(data.held_out.documents)


def test_copies_of_a_document_stay_on_one_side(tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus", documents=6)
    for path in sorted((tmp_path / "corpus").iterdir()):
        (tmp_path / "corpus" / f"copy-{path.name}").write_bytes(path.read_bytes())
    table = prepare_data(tiny_recipe(tmp_path)).cache.documents
    sides = {digest: set(table["held_out"][table["digest"] == digest].tolist()) for digest in table["digest"]}
    assert all(len(side) == 1 for side in sides.values())


def test_one_long_document_is_cut_into_a_training_and_a_held_out_part(tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    text = "".join(f"line {number}\n" for number in range(500))
    (tmp_path / "corpus" / "only.txt").write_text(text)
    data = prepare_data(tiny_recipe(tmp_path))
    first, second = data.training.read(1, len(data.training) - 1)[0], data.held_out.read(1, len(data.held_out) - 1)[0]
    assert bytes(first.tolist() + second.tolist()).decode() == text
    assert data.held_out.bytes == pytest.approx(0.2 * len(text), rel=0.1)


def test_rows_cover_an_epoch_once_and_the_next_epoch_in_another_order(tmp_path: Path) -> None:
    stream = prepare_data(tiny_recipe(tmp_path)).training
    rows = PackedSequences(stream, 32, 10**6, seed=3)
    epoch = [rows[number]["ids"] for number in range(rows.rows)]
    ids, _ = stream.read(0, len(stream))
    expected = {tuple(ids[begin : begin + 33]) for begin in range(0, rows.rows * 32, 32)}
    assert {tuple(row) for row in epoch} == expected
    again = PackedSequences(stream, 32, 10**6, seed=3)
    assert np.array_equal(again[5]["ids"], epoch[5])
    assert any(not np.array_equal(again[rows.rows + number]["ids"], epoch[number]) for number in range(5))


def test_text_shorter_than_a_sequence_is_an_error(tmp_path: Path) -> None:
    stream = prepare_data(tiny_recipe(tmp_path)).training
    with pytest.raises(ValueError, match=r"but one sequence needs training\.sequence_length=1000000"):
        PackedSequences(stream, 1_000_000, 1, seed=0)


def test_a_pack_says_where_documents_begin_and_no_target_is_lost() -> None:
    rows = [
        {"ids": np.array([9, 1, 2, 9, 3]), "beginnings": np.array([0, 3])},
        {"ids": np.array([4, 5, 9, 6, 7]), "beginnings": np.array([2])},
    ]
    pack = PackCollator(reset_at_documents=True)(rows)
    assert pack["input_ids"].tolist() == [[9, 1, 2, 9, 4, 5, 9, 6]]
    assert pack["shift_labels"].tolist() == [[1, 2, 9, 3, 5, 9, 6, 7]]
    assert pack["cu_seqlens"].tolist() == [0, 3, 4, 6, 8]


def test_a_document_in_a_pack_gets_the_loss_it_gets_alone(tmp_path: Path) -> None:
    """Neither state nor convolution crosses from one document to the next."""
    recipe = tiny_recipe(tmp_path)
    torch.manual_seed(0)
    model = MomentumDeltaNetForCausalLM(model_config(recipe, 257, 256)).double()
    parts = [np.array([256, *f"document {number} text".encode()]) for number in range(3)]
    joined = np.concatenate([*parts, [256]])
    starts = np.cumsum([0, *(len(part) for part in parts[:-1])])
    pack = PackCollator(reset_at_documents=True)([{"ids": joined, "beginnings": starts}])
    together = model(input_ids=pack["input_ids"], cu_seqlens=pack["cu_seqlens"], use_cache=False).logits[0]
    alone = torch.cat([model(input_ids=torch.from_numpy(part)[None], use_cache=False).logits[0] for part in parts])
    torch.testing.assert_close(together, alone, rtol=1e-10, atol=1e-10)


def test_preparation_killed_in_the_middle_resumes_and_gives_the_same_tokens(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path)
    script = f"""
import os, signal
from collections.abc import Callable
from pathlib import Path
from typing import Any
from training_support import tiny_recipe
from mdn.training import tokens as token_cache
from mdn.training.dataset import prepare_data
token_cache._shard_bytes = lambda corpus: 2000
write, count = token_cache.write_atomically, 0
def dying(path, content):
    global count
    count += 1
    if count == 8:  # inside the third shard
        path.with_name(path.name + ".partial").write_bytes(content[:10])
        os.kill(os.getpid(), signal.SIGKILL)
    write(path, content)
token_cache.write_atomically = dying
prepare_data(tiny_recipe(Path({str(tmp_path)!r})))
"""
    killed = subprocess.run([sys.executable, "-c", script], timeout=120)
    assert killed.returncode == -signal.SIGKILL
    [directory] = (path for path in (tmp_path / "cache").glob("tokens-*") if path.is_dir())
    assert not (directory / "index.json").exists()
    assert len(list(directory.glob("*.npy"))) == 2
    kept = (directory / "shard-00000.bin").stat().st_mtime_ns
    resumed = prepare_data(recipe)
    assert (directory / "shard-00000.bin").stat().st_mtime_ns == kept
    fresh = prepare_data(tiny_recipe(tmp_path, data={"cache_dir": str(tmp_path / "fresh")}))
    for one, other in ((resumed.training, fresh.training), (resumed.held_out, fresh.held_out)):
        assert np.array_equal(one.read(0, len(one))[0], other.read(0, len(other))[0])


def test_several_processes_tokenise_to_the_same_cache_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = prepare_data(tiny_recipe(tmp_path))
    monkeypatch.setattr(token_cache, "SMALL_CORPUS", 0)
    monkeypatch.setattr(token_cache, "_shard_bytes", lambda corpus: 2000)
    data = {"cache_dir": str(tmp_path / "parallel"), "workers": 2}
    parallel = prepare_data(tiny_recipe(tmp_path, data=data))
    assert len(parallel.cache.index["shards"]) > 2
    assert np.array_equal(
        alone.training.read(0, len(alone.training))[0], parallel.training.read(0, len(parallel.training))[0]
    )


def test_the_cache_is_found_again_and_changes_with_content_and_tokenizer(tmp_path: Path) -> None:
    first = prepare_data(tiny_recipe(tmp_path)).cache.directory
    before = (first / "index.json").stat().st_mtime_ns
    assert prepare_data(tiny_recipe(tmp_path)).cache.directory == first
    assert (first / "index.json").stat().st_mtime_ns == before
    bpe = {"kind": "bpe", "vocab_size": 300}
    assert prepare_data(tiny_recipe(tmp_path, tokenizer=bpe)).cache.directory != first
    (tmp_path / "corpus" / "000.txt").write_text("changed\n" * 50)
    assert prepare_data(tiny_recipe(tmp_path)).cache.directory != first


def test_a_tokenizer_that_is_replaced_in_its_directory_is_used(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path, tokenizer={"kind": "pretrained", "path": str(tmp_path / "own")})
    found = []
    for size in (265, 262):
        bpe = {"kind": "bpe", "vocab_size": size}
        made = prepare_data(tiny_recipe(tmp_path, tokenizer=bpe)).tokenizer
        shutil.copytree(made, tmp_path / "own", dirs_exist_ok=True)
        found.append(prepare_data(recipe))
    assert [data.cache.vocab_size for data in found] == [265, 262]
    moved = tiny_recipe(tmp_path, tokenizer={"kind": "pretrained", "path": str(tmp_path / "moved")})
    (tmp_path / "own").rename(tmp_path / "moved")
    assert prepare_data(moved).tokenizer == found[1].tokenizer  # the same files elsewhere are the same tokenizer


def _overwrite(content: bytes) -> Callable[[Path], None]:
    """The whole file becomes repetitions of `content`, in its old size."""

    def damage(file: Path) -> None:
        size = file.stat().st_size
        file.write_bytes((content * size)[:size])

    return damage


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("shard-00000.bin", _overwrite(b"\x20\x00")),  # valid ids, but not those of the text
        ("shard-00000.bin", _overwrite(b"\xff")),
        ("shard-00000.bin", lambda file: file.write_bytes(file.read_bytes()[:-1])),
        ("shard-00000.bin", Path.unlink),
        ("shard-00000.npy", _overwrite(b"\x00")),
        ("index.json", lambda file: file.write_bytes(file.read_bytes()[:40])),
        ("index.json", lambda file: file.write_text(file.read_text().replace('"end_id": 256', '"end_id": 32'))),
    ],
)
def test_a_damaged_cache_is_refused_with_its_path_and_the_remedy(
    tmp_path: Path, name: str, damage: Callable[[Path], Any]
) -> None:
    recipe = tiny_recipe(tmp_path)
    directory = prepare_data(recipe).cache.directory
    damage(directory / name)
    with pytest.raises(ValueError, match=rf"token cache {directory} is damaged: {name}: .*delete that directory"):
        prepare_data(recipe).training.read(0, 32)
    shutil.rmtree(directory)
    assert len(prepare_data(recipe).training) > 0


def test_a_whole_cache_is_used_where_nobody_can_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = tiny_recipe(tmp_path)
    expected, _ = prepare_data(recipe).training.read(0, 32)
    _refuse_writing_below(tmp_path / "cache", monkeypatch)
    found, _ = prepare_data(recipe).training.read(0, 32)
    assert (found == expected).all()


def test_an_unwritable_cache_names_the_variable_that_moves_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = tiny_recipe(tmp_path)
    _refuse_writing_below(tmp_path / "cache", monkeypatch)
    with pytest.raises(OSError, match=rf"the cache {tmp_path / 'cache'} cannot be written .*set MDN_CACHE or"):
        prepare_data(recipe)


def _refuse_writing_below(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a read-only disk, also for root."""
    plain_open, plain_mkdir = Path.open, Path.mkdir

    def guarded_open(path: Path, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        if path.is_relative_to(folder) and set(mode) & set("wa+x"):
            raise OSError(errno.EROFS, "Read-only file system", str(path))
        return plain_open(path, mode, *arguments, **options)

    def guarded_mkdir(path: Path, *arguments: Any, **options: Any) -> None:
        if path.is_relative_to(folder) and not path.exists():
            raise OSError(errno.EROFS, "Read-only file system", str(path))
        plain_mkdir(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", guarded_open)
    monkeypatch.setattr(Path, "mkdir", guarded_mkdir)


def test_files_of_a_folder_that_are_not_read_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tiny_recipe(tmp_path)
    (tmp_path / "corpus" / "notes.md").write_text("# not read")
    prepare_data(recipe)
    told = capsys.readouterr().err
    assert "1 files are not read (.md; first" in told
    assert "notes.md" in told


def test_a_hub_dataset_out_of_reach_is_an_error_that_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    settings = DataSettings(source="hub", dataset="nobody/nothing")
    with pytest.raises(ValueError, match=r"data\.dataset 'nobody/nothing' is not in the cache"):
        open_corpus(settings, tmp_path).fingerprint()


def test_hub_rows_are_read_and_skipped_by_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Hub itself is out of reach in tests; `datasets` reads a local file in its place."""
    import datasets

    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"text": f"row {number}"}) + "\n" for number in range(5)) + '{"text": null}\n')
    original = datasets.load_dataset

    def local(name: str, subset: str | None, *, split: str, streaming: bool, revision: str):
        assert (name, revision) == ("owner/name", "abc")
        return original("json", data_files=str(file), split=split, streaming=streaming)

    monkeypatch.setattr(datasets, "load_dataset", local)
    corpus = open_corpus(DataSettings(source="hub", dataset="owner/name"), tmp_path)
    monkeypatch.setattr(corpus, "_commit", lambda: "abc")
    assert list(corpus.documents()) == [*(f"row {number}" for number in range(5)), ""]
    assert list(corpus.documents(3)) == ["row 3", "row 4", ""]
    other = open_corpus(DataSettings(source="hub", dataset="owner/name", text_field="body"), tmp_path)
    monkeypatch.setattr(other, "_commit", lambda: "abc")
    with pytest.raises(ValueError, match=r"'owner/name': expected rows with a text field 'body'"):
        list(other.documents())
