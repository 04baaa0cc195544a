"""``halfstep check``: limits, exit codes, and a line for each that does not hold."""

import math

import pytest
from tests.cli.called import called
from tests.report import records
from tests.report.records import counted, sample, tensor

from halfstep._tools.cli import main
from halfstep._tools.record.files import file_of


def check(capsys, *argv):
    code, out, err = called(capsys, "check", *argv)
    assert all("was skipped" in line for line in err.splitlines())
    return code, out.splitlines()


def test_a_good_run_is_one_line(tmp_path, capsys):
    code, lines = check(capsys, records.healthy(tmp_path))
    assert code == 0
    assert lines == [
        f"{tmp_path}: good: 60 steps, 0 % skipped (limit 1 %), at most 0 % underflow (limit 5 %), "
        "at most 0 % overflow (limit 0 %)"
    ]


def test_buffers_that_stay_nan_fail(tmp_path, capsys):
    seen = [records.step(1), records.step(2), records.buffers(2, "bn.running_mean")]
    folder = records.write(tmp_path, [records.header(), *seen, records.end(1.0, 2)])
    line = "1 buffer of the model stayed inf or NaN from step 2 on: bn.running_mean (--allow-nan)"
    assert check(capsys, folder, "--max-skipped", "1%") == (1, [f"{tmp_path}: {line}"])
    assert check(capsys, folder, "--max-skipped", "1%", "--allow-nan")[0] == 0


def test_a_line_for_each_limit_with_what_was_seen_and_where(tmp_path, capsys):
    code, lines = check(
        capsys, records.with_skips(tmp_path), "--max-skipped", "1%", "--max-underflow", "5%"
    )
    assert code == 1
    assert lines == [
        f"{tmp_path}: skipped: 3 % of the steps, the limit is 1 %: 3 of 100, steps 41, 42 and 80, "
        "which began in blocks.1.attn",
        f"{tmp_path}: underflow: 12 % of the gradient of head.weight in fp16, the limit is 5 %: at "
        "worst 12 %, in step 10",
    ]


def test_the_module_where_most_of_the_counted_skips_began_comes_first(tmp_path, capsys):
    began = {1: "embed", 2: "embed", 3: "embed", 41: "embed", 60: "head", 80: "head"}
    scales = {1: 8192.0, 2: 4096.0, 3: 2048.0}  # the first three are normal: a start
    events = [records.header(), records.model_event(), records.policy()]
    for n in range(1, 101):
        make = records.skip if n in began else records.step
        events.append(make(n, scale=scales.get(n, 1024.0)))
        events += [records.culprits(n, began[n])] if n in began else []
    folder = records.write(tmp_path, [*events, records.end(50.0, 100)])
    (line,) = check(capsys, folder, "--max-skipped", "1%")[1]
    assert line.endswith("steps 41, 60 and 80, which began in head and embed")


def test_gradients_that_never_were_in_fp16_underflow_nowhere(tmp_path, capsys):
    rows = [tensor("parameter_gradient", "norm.weight", records.norm_like())]
    rest = [records.step(1), sample(1, rows), records.end(1.0, 1)]
    limit = ("--max-underflow", "0%")
    in_fp16 = records.write(tmp_path / "a", [records.header(), records.policy(), *rest])
    assert check(capsys, in_fp16, *limit)[0] == 0
    in_fp32 = records.write(tmp_path / "b", [records.header(), *rest])
    assert check(capsys, in_fp32, *limit)[0] == 1


@pytest.mark.parametrize(
    ("limits", "code"),
    [
        (["--max-skipped", "3%"], 0),
        (["--max-skipped", "0.03"], 0),
        (["--max-skipped", "2.9%"], 1),
        (["--max-skipped", "0"], 1),
        (["--max-underflow", "12%"], 0),
        (["--max-underflow", "0.119"], 1),
        (["--max-skipped", "100%", "--max-underflow", "11 %"], 1),
        (["--max-overflow", "0%"], 0),
        ([], 1),
    ],
)
def test_only_what_was_asked_for_is_checked(tmp_path, capsys, limits, code):
    assert check(capsys, records.with_skips(tmp_path), *limits)[0] == code


def test_the_start_up_is_not_counted(tmp_path, capsys):
    events = [records.header(), records.skip(1, 8.0), *map(records.step, range(2, 21))]
    records.write(tmp_path, [*events, records.end(1.0, 20)])
    code, (line,) = check(capsys, tmp_path, "--max-skipped", "0%")
    assert code == 0
    assert "0 % skipped, besides 1 by dynamic scaling at the start (limit 0 %)" in line


def test_a_run_in_float32_is_not_held_to_what_fp16_would_lose(tmp_path, capsys):
    assert check(capsys, records.underflowing(tmp_path))[0] == 0
    assert check(capsys, tmp_path, "--max-underflow", "5%")[0] == 1


def test_gradients_that_are_nothing_but_zeros(tmp_path, capsys):
    rows = [tensor("parameter_gradient", f"{n}.weight", counted({}, zeros=9)) for n in "ab"]
    events = [records.header(), records.policy(), records.step(1), sample(1, rows)]
    records.write(tmp_path, [*events, records.end(1.0, 1)])
    code, (line,) = check(capsys, tmp_path, "--max-underflow", "5%")
    assert code == 1
    assert "half of the gradients or more are all zeros in every sample" in line


def test_many_layers_beyond_a_limit_are_counted(tmp_path, capsys):
    lossy = counted({0: 80}, zeros=20, flushed=20)
    rows = [tensor("parameter_gradient", f"{n}.weight", lossy) for n in "abcdefgh"]
    events = [records.header(), records.policy(), records.step(1), sample(1, rows)]
    records.write(tmp_path, [*events, records.end(1.0, 1)])
    _, lines = check(capsys, tmp_path, "--max-underflow", "5%")
    assert len(lines) == 6
    assert "and 3 more layers beyond the limit" in lines[-1]


def test_outputs_and_weights_that_overflow(tmp_path, capsys):
    rows = [
        tensor("output", "head", counted({0: 97}, inf=1, nan=2), "float16"),
        tensor("parameter", "big.weight", counted({20: 1, 0: 9})),
        tensor("output", "wide", counted({0: 9}, inf=1), "float16"),
    ]
    events = [records.header(), records.step(1), sample(1, rows), records.end(1.0, 1)]
    records.write(tmp_path, events)
    code, lines = check(capsys, tmp_path, "--max-overflow", "9%")
    assert code == 1
    assert [line.removeprefix(f"{tmp_path}: overflow: ") for line in lines] == [
        "10 % of the output wide is inf, NaN or too large for fp16, the limit is 9 %: 1 inf, 0 NaN "
        "in 1 sample",
        "10 % of the weight big.weight is inf, NaN or too large for fp16, the limit is 9 %: 0 inf, "
        "0 NaN in 1 sample",
    ]
    assert len(check(capsys, tmp_path, "--max-overflow", "1%")[1]) == 3


def test_an_output_in_float32_may_be_larger_than_fp16(tmp_path, capsys):
    rows = [tensor("output", "loss", counted({20: 1}), "float32")]
    events = [records.header(), records.step(1), sample(1, rows), records.end(1.0, 1)]
    assert check(capsys, records.write(tmp_path, events), "--max-overflow", "0")[0] == 0


def test_one_step_is_singular(tmp_path, capsys):
    events = [records.header(), records.step(1, loss=math.nan), records.end(1.0, 1)]
    _, (line,) = check(capsys, records.write(tmp_path, events), "--max-skipped", "100%")
    assert "the loss was inf or NaN in 1 step, first in step 1" in line


def test_a_run_that_failed_fails_whatever_the_limits(tmp_path, capsys):
    folder = records.failed(tmp_path)
    code, (error, loss) = check(capsys, folder, "--max-skipped", "100%")
    assert code == 1
    assert "the run ended after 9 steps, with an error: ValueError: the loss is NaN" in error
    assert "the loss was inf or NaN in 3 steps, first in step 7, last NaN" in loss
    _, (line,) = check(capsys, folder, "--max-skipped", "100%", "--allow-unfinished")
    assert "the loss was" in line
    allowed = ["--allow-unfinished", "--allow-nan"]
    assert check(capsys, folder, "--max-skipped", "100%", *allowed)[0] == 0


def test_what_was_diagnosed_fails_with_the_reason_and_the_cure(tmp_path, capsys):
    code, lines = check(capsys, records.diagnosed(tmp_path), "--max-skipped", "100%")
    assert code == 1
    assert lines == [
        f"{tmp_path}: steps 41, 42 went bad: range of float16: linear (addmm) in blocks.1.mlp, "
        "forward needs a wider dtype, in float32 it is finite; cure: autocast(..., "
        'policy="standard; linear@blocks.1.mlp:fp32") (--allow-nan)',
        f"{tmp_path}: step 80 went bad: maths: log in head, forward is not finite in float32 "
        "either (--allow-nan)",
    ]
    assert check(capsys, tmp_path, "--max-skipped", "100%", "--allow-nan")[0] == 0


def test_diagnoses_of_too_large_a_scale_are_a_matter_of_the_limit_on_skips(tmp_path, capsys):
    steps = [*map(records.step, range(1, 50)), records.skip(50)]
    rest = [records.diagnosis(50, verdict="scale"), records.diagnosis(50, verdict="none")]
    records.write(tmp_path, [records.header(), *steps, *rest, records.end(1.0, 50)])
    assert check(capsys, tmp_path, "--max-skipped", "2%")[0] == 0
    code, (line,) = check(capsys, tmp_path, "--max-skipped", "1%")
    assert (code, "skipped: 2 %" in line) == (1, True)


def test_many_places_that_went_bad_are_counted(tmp_path, capsys):
    places = [records.diagnosis(1, bad=records.bad_op(module=f"m{n}")) for n in range(8)]
    events = [records.header(), records.step(1), *places, records.end(1.0, 1)]
    _, lines = check(capsys, records.write(tmp_path, events), "--max-skipped", "5%")
    assert len(lines) == 6
    assert lines[-1].endswith("and 3 more places went bad in other steps")


def test_a_run_without_an_end_fails_unless_it_may_be_unfinished(tmp_path, capsys):
    folder = records.killed(tmp_path)
    code, (line,) = check(capsys, folder, "--max-skipped", "1%")
    assert code == 1
    assert "the record has no end after 5 steps" in line
    assert check(capsys, folder, "--max-skipped", "1%", "--allow-unfinished")[0] == 0


def test_ranks_that_disagree_fail(tmp_path, capsys):
    code, (line,) = check(capsys, records.several_ranks(tmp_path))
    assert code == 1
    assert "ranks disagree from step 20 on" in line


def test_lines_that_are_damaged_are_told_beside_the_verdict(tmp_path, capsys):
    events = [records.header(), records.step(1), records.step(2), records.end(1.0, 2)]
    file = file_of(records.write(tmp_path, events), 0)
    file.write_bytes(file.read_bytes().replace(b'"step":2', b'"step":3'))
    assert main(["check", str(tmp_path), "--max-skipped", "1%"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"{tmp_path}: good: 1 step,")
    assert err == (
        f"{tmp_path}: line 3 of rank0.jsonl is damaged and was left out "
        "(its checksum does not match)\n"
    )


def test_what_was_not_sampled_cannot_be_held_to_a_limit(tmp_path, capsys):
    events = [records.header(), records.step(1), records.end(1.0, 1)]
    records.write(tmp_path, events)
    code, (line,) = check(capsys, tmp_path, "--max-underflow", "5%")
    assert code == 1
    assert "no gradients were sampled, so the limit of 5 % cannot be checked" in line
    assert check(capsys, tmp_path, "--max-skipped", "5%")[0] == 0


@pytest.mark.parametrize(
    ("share", "message"),
    [
        ("5", "'5' is not between 0% and 100%: write 5% or 0.05"),
        ("-1%", "'-1%' is not between 0% and 100%"),
        ("101%", "'101%' is not between 0% and 100%: write 1% or 0.01"),
        ("1000%", "'1000%' is not between 0% and 100%: write 1% or 0.01"),
        ("1000", "'1000' is not between 0% and 100%: write 1% or 0.01"),
        ("nan", "'nan' is not between 0% and 100%"),
        ("few", "'few' is not a valid share: write 1% or 0.01"),
        ("%", "'%' is not a valid share: write 1% or 0.01"),
    ],
)
def test_what_is_no_share_is_refused(tmp_path, capsys, share, message):
    with pytest.raises(SystemExit) as ended:
        main(["check", str(tmp_path), f"--max-skipped={share}"])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_the_limits_in_the_help_are_those_of_no_limits(capsys):
    from halfstep._common.numbers import percent
    from halfstep._tools.report.limits import DEFAULTS

    with pytest.raises(SystemExit):
        main(["check", "--help"])
    shares = (DEFAULTS.skipped, DEFAULTS.underflow, DEFAULTS.overflow)
    names = ("skipped", "underflow", "overflow")
    limits = (f"--max-{n} {percent(s)}" for n, s in zip(names, shares, strict=True))
    assert " ".join(limits).replace(" %", "%") in capsys.readouterr().out


@pytest.mark.parametrize(
    ("lost", "limits", "code"),
    [
        (0.97, [], 1),
        (0.2, [], 1),  # 60 % of one weight
        (0.01, ["--max-lost-updates", "51%"], 0),
        (0.01, ["--max-lost-updates", "50%"], 1),
        (0.97, ["--max-overflow", "0%"], 0),
    ],
)
def test_lost_updates(tmp_path, capsys, lost, limits, code):
    found, lines = check(capsys, records.losing_updates(tmp_path, lost), *limits)
    assert found == code
    if not limits and lost == 0.2:
        assert lines == [
            f"{tmp_path}: lost updates: 60 % of the updates of blocks.1.mlp.weight in bfloat16, "
            "the limit is 50 %: 3,600 of 6,000 counted"
        ]


def test_updates_of_float32_weights_are_held_to_no_default(tmp_path, capsys):
    folder = records.losing_updates(tmp_path, dtype="float32")
    assert check(capsys, folder)[0] == 0
    assert check(capsys, folder, "--max-lost-updates", "10%")[0] == 1


def test_updates_that_were_not_counted_cannot_be_held_to_a_limit(tmp_path, capsys):
    code, (line,) = check(capsys, records.healthy(tmp_path), "--max-lost-updates", "10%")
    assert code == 1
    assert "lost updates: no updates were sampled, so the limit of 10 % cannot be checked" in line


def test_what_followed_from_a_bad_step_is_one_line(tmp_path, capsys):
    nan = counted({}, nan=9)
    rows = [tensor("output", f"block.{n}", nan, "float16") for n in range(20)]
    steps = [records.step(n, loss=math.nan if n >= 7 else 1.0) for n in range(1, 21)]
    events = [records.header(), records.policy(), *steps, sample(10, rows), records.end(1.0, 20)]
    code, (loss, overflow) = check(capsys, records.write(tmp_path, events), "--max-overflow", "0%")
    assert code == 1
    assert "the loss was inf or NaN in 14 steps, first in step 7" in loss
    assert overflow == (
        f"{tmp_path}: overflow: 20 of the outputs and weights held inf or NaN, first sampled at "
        "step 10, after step 7 had gone bad; the limit is 0 %"
    )
