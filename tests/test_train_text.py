"""examples/train_text.py: one training in four precisions, its records, and the model in it."""

import re
import sys
from pathlib import Path

import pytest
import torch
from examples import train_text
from examples.train_text import GPT, SIZES, Corpus, GPTConfig, draw_batches
from tests import forked

from halfstep._tools.cli import main

SCRIPT = Path(train_text.__file__)
ROW = re.compile(r"^(\S+) +(\S+) +(\S+) +(\S+) +(\S+) +(\d+) +(\S+) +(\S+)%$", re.MULTILINE)


def test_four_precisions_side_by_side(tmp_path: Path) -> None:
    options = ["--size", "tiny", "--steps", "40"]
    done = forked.python(SCRIPT, *options, cwd=tmp_path, warnings="error")
    assert (done.code, done.err) == (0, "")
    rows = {name: values for name, *values in ROW.findall(done.out)}
    assert list(rows) == ["fp32", "bf16", "fp16-unscaled", "fp16"]
    held_out = {name: float(values[1]) for name, values in rows.items()}
    assert abs(held_out["bf16"] - held_out["fp32"]) < 0.05
    assert abs(held_out["fp16"] - held_out["fp32"]) < 0.01
    assert held_out["fp16-unscaled"] > held_out["fp32"] + 0.1
    zeros = {name: float(values[6]) for name, values in rows.items()}
    assert zeros["fp16-unscaled"] > 10 > 1 > max(zeros["fp32"], zeros["fp16"])
    assert [name for name, values in rows.items() if values[5] != "-"] == ["fp16"]
    shown = done.out.strip().splitlines()[-1].partition("halfstep report ")[2].split()
    report = [str(tmp_path / each) if each.startswith("demo-out") else each for each in shown]
    assert main(["report", *report]) == 0
    # A second training takes the place of the first one.
    options = ["--size", "tiny", "--steps", "2", "--precision", "fp32"]
    again = forked.python(SCRIPT, *options, cwd=tmp_path, warnings="error")
    assert again.code == 0
    steps = (tmp_path / "demo-out" / "fp32" / "rank0.jsonl").read_text().count('"kind": "step"')
    assert steps <= 2


def test_ctrl_c_shows_what_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_in = train_text.run_in

    def interrupted(name: str, *rest: object) -> object:
        if name == "bf16":
            raise KeyboardInterrupt
        return run_in(name, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(train_text, "run_in", interrupted)
    options = ["--size", "tiny", "--steps", "2", "-o", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["train_text.py", *options])
    train_text.main()
    assert [name for name, *_ in ROW.findall(capsys.readouterr().out)] == ["fp32"]


def test_a_token_does_not_see_the_ones_after_it() -> None:
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab=11, context=8, layers=2, heads=2, width=16))
    tokens = torch.arange(8).unsqueeze(0)
    changed = tokens.clone()
    changed[0, 5] = 10
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.equal(before[:, 5:], after[:, 5:])


def test_the_43m_size_has_43_million_parameters() -> None:
    with torch.device("meta"):
        counts = [GPT(GPTConfig.of_size(size, vocab=100)).num_parameters() for size in SIZES]
    assert counts == sorted(counts)
    assert round(counts[-1] / 1e6) == 43


def test_the_text_is_long_and_a_tenth_of_it_is_held_out(tmp_path: Path) -> None:
    corpus = Corpus()
    assert len(corpus.train) > 300_000
    file = tmp_path / "text.txt"
    file.write_text("".join(chr(0x4E00 + i) for i in range(2000)), encoding="utf-8")
    corpus = Corpus(file)
    assert corpus.vocab == 2000
    assert set(corpus.train.tolist()).isdisjoint(corpus.held_out.tolist())
    assert len(corpus.held_out) == 200


def test_batches_depend_on_the_seed_alone() -> None:
    tokens = torch.arange(1000)
    drawn = [list(draw_batches(tokens, 3, 4, 16, seed, "cpu")) for seed in (1, 1, 2)]
    first, again, other = (torch.cat([inputs for inputs, _ in batches]) for batches in drawn)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    inputs, targets = drawn[0][0]
    assert torch.equal(targets, inputs + 1)
