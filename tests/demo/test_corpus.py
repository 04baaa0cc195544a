import os

import pytest
import torch

from halfstep._demo import corpus as corpus_module
from halfstep._demo.corpus import Corpus, draw_batches, held_out_windows
from halfstep.errors import DemoError

CONTEXT = 16


def test_every_python_carries_enough_english():
    corpus = Corpus.load(None, context=256)
    assert len(corpus.train) > 300_000
    assert len(corpus.held_out) > 30_000
    assert " the " in corpus_module.python_text()


def test_characters_are_numbered_without_gaps_and_nothing_is_lost(tmp_path):
    file = tmp_path / "text.txt"
    words = "Grüße, мир, 世界 🙂\r\n" * 100
    file.write_bytes(words.encode())
    corpus = Corpus.load(file, CONTEXT)
    assert corpus.vocab == len(set(words))
    both = torch.cat([corpus.train, corpus.held_out])
    assert sorted(both.unique().tolist()) == list(range(corpus.vocab))
    characters = sorted(set(words))
    assert sorted(characters[i] for i in both.tolist()) == sorted(words)


def test_a_byte_order_mark_is_no_text(tmp_path):
    file = tmp_path / "text.txt"
    file.write_bytes(b"\xef\xbb\xbf" + b"abcd" * 500)
    assert Corpus.load(file, CONTEXT).vocab == 4


def test_held_out_text_is_from_all_over_and_never_trained_on(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("".join(chr(0x4E00 + i) for i in range(2000)))  # each character once
    corpus = Corpus.load(file, CONTEXT)
    assert set(corpus.train.tolist()).isdisjoint(corpus.held_out.tolist())
    assert len(corpus.held_out) == 200
    assert corpus.held_out.min() < 400
    assert corpus.held_out.max() > 1600


def test_batches_repeat_for_a_seed_and_differ_for_another():
    tokens = torch.arange(1000)
    batches = [list(draw_batches(tokens, 3, 4, CONTEXT, seed, "cpu")) for seed in (1, 1, 2)]
    first, again, other = ([inputs for inputs, _ in drawn] for drawn in batches)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    assert not torch.equal(first[0], first[1])


def test_a_target_is_the_character_after_its_input():
    for inputs, targets in draw_batches(torch.arange(100), 20, 4, CONTEXT, 0, "cpu"):
        assert inputs.shape == (4, CONTEXT)
        assert torch.equal(targets, inputs + 1)


def test_the_shortest_text_can_be_drawn_from():
    tokens = torch.arange(CONTEXT + 1)
    ((inputs, targets),) = draw_batches(tokens, 1, 2, CONTEXT, 0, "cpu")
    assert inputs[0].tolist() == list(range(CONTEXT))
    assert targets[0, -1] == CONTEXT


def test_held_out_windows_do_not_overlap_and_are_from_all_over():
    windows = torch.cat([inputs for inputs, _ in held_out_windows(torch.arange(17_000), 16, 40)])
    assert windows.shape == (40, 16)
    assert windows.flatten().unique().numel() == windows.numel()
    assert windows.max() > 15_000


LONG = 500
BAD_CONTENTS = {
    "empty": (b"", "is empty; --text needs a file"),
    "blank": (b" \n\n\t", "is empty"),
    "nul": (b"abc\0def" * LONG, "binary file .* needs UTF-8 text"),
    "latin1": ("Grüße ".encode("latin-1") * LONG, r"not UTF-8 text \(byte 2 .*iconv"),
    "png": (b"\x89PNG\r\n\x1a\n" * LONG, r"not UTF-8 text \(byte 0"),
    "short": (b"To be, or not to be", r"too short: 19 characters, .* 340 or more; give a longer"),
}
BAD_NAMES = {
    "missing": "No such file",
    ".": "Is a directory",
    "a\0b": "null",
    "no\nsuch": r"'\S*no\\nsuch'",
}


@pytest.mark.parametrize(("data", "message"), BAD_CONTENTS.values(), ids=BAD_CONTENTS)
def test_what_is_no_text_gets_one_clear_line(data, message, tmp_path):
    file = tmp_path / "file"
    file.write_bytes(data)
    with pytest.raises(DemoError, match=message) as caught:
        Corpus.load(file, CONTEXT)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("name", "message"), BAD_NAMES.items(), ids=repr)
def test_what_is_no_file_gets_one_clear_line(name, message, tmp_path):
    with pytest.raises(DemoError, match=f"cannot read --text .*{message}") as caught:
        Corpus.load(tmp_path / name, CONTEXT)
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_unreadable_file(tmp_path):
    file = tmp_path / "secret"
    file.write_text("x" * 1000)
    file.chmod(0)
    with pytest.raises(DemoError, match="Permission denied"):
        Corpus.load(file, CONTEXT)


def test_a_file_without_end_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(corpus_module, "LARGEST_FILE", 2**20)
    file = tmp_path / "large"
    file.write_bytes(b"abcd" * 2**18 + b"e")
    with pytest.raises(DemoError, match="larger than 1 MiB"):
        Corpus.load(file, CONTEXT)
