"""What is said about a run: what happened, how bad it is, what to do."""

import math
import re

import pytest
import torch
from tests.report import records
from tests.report.records import counted, layers, sample, skip, step, tensor

import halfstep
from halfstep._common.text import Code, code, names, plain, say
from halfstep._tools.record.read import read_run
from halfstep._tools.report.summarize import summarize
from halfstep._tools.report.text import sentences


def said_of(folder):
    return sentences(summarize(read_run(folder)))


def said(folder, *events, header=None, policy=None, end=True):
    """Return what is said of 100 steps and these events, sampled well."""
    numbers = {event["step"] for event in events if event["event"] == "step"}
    steps = [step(n) for n in range(1, 101) if n not in numbers]
    own = [event for event in events if event["event"] == "step"]
    steps = sorted([*steps, *own], key=lambda event: event["step"])
    others = [event for event in events if event["event"] != "step"]
    samples = [sample(n, layers()) for n in (10, 20, 30)]
    first = [header or records.header(), policy or records.policy(), records.model_event()]
    last = [records.end(50.0, 100)] if end else []
    return said_of(records.write(folder, [*first, *steps, *samples, *others, *last]))


def the_one(found, words):
    (sentence,) = [sentence for sentence in found if words in sentence.text]
    return sentence


def codes(sentence):
    return [part.text for part in sentence.parts if isinstance(part, Code)]


ADVICE = "halfstep run --diagnose train.py"


# --- all is well ----------------------------------------------------------------------------------


def test_a_healthy_run_is_one_good_sentence_with_the_numbers(tmp_path):
    (sentence,) = said_of(records.healthy(tmp_path))
    assert sentence.severity == "good"
    assert sentence.text == (
        "All is well: 60 steps; none skipped; the loss went from 4 to 2.033 and the scale stayed "
        "at 2^10; no gradient underflows."
    )


def test_a_healthy_run_in_bf16(tmp_path):
    (sentence,) = said_of(records.bf16(tmp_path))
    assert sentence.severity == "good"
    assert "scale" not in sentence.text


def island_of(module: str) -> str:
    return f'halfstep.autocast(..., policy="standard; @{module}:fp32", module=model)'


class Part(torch.nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)


def test_skips_at_the_start_are_well(tmp_path):
    (sentence,) = said(tmp_path, skip(1, 4096.0), skip(2, 2048.0))
    assert sentence.severity == "good"
    assert "; 2 skipped, all by dynamic scaling at the start; " in sentence.text


def test_a_little_underflow_is_told_with_its_size(tmp_path):
    little = counted({0: 24_999}, zeros=1, flushed=1)
    rows = [tensor("parameter_gradient", "tail.weight", little)]
    (sentence,) = said(tmp_path, *(sample(n, rows) for n in (40, 50, 60)))
    assert sentence.severity == "good"
    assert "at most 0.004 % of the gradient entries" in sentence.text


def test_notes_do_not_make_a_run_bad(tmp_path):
    good, note = said(tmp_path, records.note(3, "the model is compiled"))
    assert (good.severity, note.severity) == ("good", "notice")
    assert note.text == "Step 3: the model is compiled."


def test_a_note_after_the_last_step_has_no_step(tmp_path):
    found = said(tmp_path, records.note(101, "the masters have kept them"))
    assert the_one(found, "masters").text == "the masters have kept them."


def plain_run(folder, *tensors, policy=None):
    """Return what is said of a run without a scaler, every step of which was sampled."""
    rows = [tensor(*each) for each in tensors]
    events = [step(n, scale=None, scale_after=None) for n in range(1, 61)]
    samples = [sample(n, rows, 1.0) for n in (1, 20, 40)]
    first = [records.header(), records.model_event(), *([policy] if policy else [])]
    return said_of(records.write(folder, [*first, *events, *samples, records.end(30.0, 60)]))


LOSSY = counted({-30: 330, -5: 670})


def test_a_float32_run_is_not_said_to_underflow(tmp_path):
    good, notice = plain_run(tmp_path, ("parameter_gradient", "head.weight", LOSSY))
    most = "at most 33 % of the gradient entries of a parameter would underflow in fp16."
    assert good.text.endswith(most)
    assert "33 % of the gradient entries of `head.weight` would underflow in fp16" in notice.text


def test_an_autocast_that_lowers_to_float32_lowers_nothing(tmp_path):
    policy = records.policy("float32")
    good, _ = plain_run(tmp_path, ("parameter_gradient", "head.weight", LOSSY), policy=policy)
    assert "would underflow in fp16" in good.text


def test_a_small_gradient_of_float32_would_underflow_nowhere(tmp_path):
    (good,) = plain_run(tmp_path, ("parameter_gradient", "head.weight", records.bell(-3)))
    assert good.text.endswith("no gradient would underflow in fp16.")


def test_half_parameters_underflow_without_autocast(tmp_path):
    half = ("parameter_gradient", "head.weight", LOSSY, "float16")
    (found,) = plain_run(tmp_path, half)
    assert found.severity == "warning"
    assert "33 % of the gradient entries of `head.weight` underflow without a scaler" in found.text


# --- skips ----------------------------------------------------------------------------------------


def test_what_was_skipped_where_it_began_and_what_helps(tmp_path):
    first, underflow = said_of(records.with_skips(tmp_path))
    assert first.text.startswith(
        "3 of 100 steps were skipped (3 %, steps 41, 42 and 80), besides 2 by dynamic scaling at "
        "the start; all began in `blocks.1.attn`."
    )
    assert codes(first) == [
        "blocks.1.attn",
        'halfstep.autocast(..., policy="standard; @blocks.1.attn:fp32", module=model)',
        ADVICE,
    ]
    # The scale stays so low because of the overflow: one cure for both.
    assert [s.severity for s in (first, underflow)] == ["warning", "warning"]
    assert (underflow.follows, underflow.cure) == (True, ())
    assert "a larger scale than 2^11 would overflow" in underflow.text


def test_a_scale_below_the_overflow_is_proposed_where_nothing_underflows_there(tmp_path):
    found = said(tmp_path, *(event for n in (50, 60) for event in (skip(n), step(n + 1))))
    call = "halfstep.GradScaler(init_scale=2.0**9, max_scale=2.0**9)"
    assert codes(found[0]) == [call, ADVICE]
    assert eval(call, {"halfstep": halfstep}).get_scale() == 512.0


def test_the_cures_are_calls_that_work(tmp_path):
    _, island, _ = codes(said_of(records.with_skips(tmp_path))[0])
    model = torch.nn.Module()
    model.blocks = torch.nn.ModuleList(torch.nn.ModuleDict({"attn": Part()}) for _ in range(2))
    names = {"halfstep": halfstep, "model": model}
    with eval(island.replace("...", '"cpu", torch.float16'), names | {"torch": torch}):
        x = torch.ones(1, 2)
        assert model.blocks[0]["attn"](x).dtype is torch.float16
        assert model.blocks[1]["attn"](x).dtype is torch.float32


@pytest.mark.parametrize("module", ["", "(model)", "Critic[1].fc", "a b;c"])
def test_no_rule_is_proposed_that_cannot_name_the_module(tmp_path, module):
    found = said(tmp_path, skip(50), records.culprits(50, module), skip(51), skip(52))
    assert "fp32" not in the_one(found, "skipped (").text


def test_skips_after_growth_are_normal(tmp_path):
    grown = [step(n, scale=2048.0, scale_after=2048.0) for n in (50, 51)]
    events = (*grown, skip(52, 2048.0), records.culprits(52, "head"))
    (good,) = said(tmp_path, *events)
    assert good.severity == "good"
    assert "; 1 skipped, by dynamic scaling after the scale had grown; " in good.text


def test_a_scale_that_goes_back_in_two_stairs_is_normal(tmp_path):
    events = (
        *(step(n, scale=2048.0, scale_after=2048.0) for n in (50, 51)),
        *(step(n, scale=4096.0, scale_after=4096.0) for n in (52, 53)),
        skip(54, 4096.0),
        step(55, scale=2048.0, scale_after=2048.0),
        skip(56, 2048.0),
    )
    (good,) = said(tmp_path, *events)
    assert "; 2 skipped, all by dynamic scaling after the scale had grown; " in good.text


def test_a_scale_that_goes_below_where_it_grew_from_is_not(tmp_path):
    events = (step(50, scale=2048.0, scale_after=2048.0), skip(51, 2048.0), skip(52, 1024.0))
    sentence = the_one(said(tmp_path, *events), "skipped (")
    assert sentence.text == (
        "1 of 100 steps was skipped (1 %, step 52), besides 1 by dynamic scaling after the scale "
        "had grown."
    )


def test_each_skipped_step_is_counted_once_with_several_optimizers(tmp_path):
    pairs = [(skip(n, 2.0**n), skip(n, 2.0**n, optimizer="SGD")) for n in (3, 2, 1)]
    last = [step(n, scale=1.0, scale_after=1.0) for n in range(4, 40)]
    steps = summarize(
        read_run(records.write(tmp_path, [records.header(), *sum(pairs, ()), *last]))
    ).steps
    assert (steps.num_start_up, steps.num_after_growth, steps.num_skipped_later) == (6, 0, 0)


def test_the_losses_of_a_gan_are_told_apart(tmp_path):
    steps = [
        step(n, optimizer="Adam", number=2 - n % 2, loss=float(n if n % 2 else 100 - n))
        for n in range(1, 61)
    ]
    (good, *_) = short_run(tmp_path, *steps)
    assert (
        "the loss of Adam went from 1 to 59, the loss of Adam 2 went from 98 to 40 and the scale"
        in good.text
    )


def test_optimizers_that_step_by_one_loss_have_one(tmp_path):
    steps = [
        step((n + 1) // 2, optimizer="Adam", number=2 - n % 2, loss=4.0 - n // 21)
        for n in range(1, 61)
    ]
    one = [{**each, "loss": 41.0 - each["step"]} for each in steps]
    (good, *_) = short_run(tmp_path, *one)
    assert "the loss went from 40 to 11" in good.text


def short_run(folder, *steps):
    events = [records.header(), records.policy(), *steps, records.end(1.0, len(steps))]
    return said_of(records.write(folder, events))


def test_a_single_skip_at_the_start_of_a_short_run_is_not_bad(tmp_path):
    found = short_run(tmp_path, skip(1, 65536.0))
    assert "bad" not in {sentence.severity for sentence in found}
    assert "No step was taken: the run ended while the scale" in found[0].text


@pytest.mark.parametrize("backoff", [0.5, 0.99])
def test_a_run_that_skips_nearly_all_steps_is_told_whatever_the_factors(tmp_path, backoff):
    scales = [2.0**30 * backoff**n for n in range(54)]
    skips = [skip(n, s, scale_after=s * backoff) for n, s in enumerate(scales, start=1)]
    last = scales[-1] * backoff
    taken = [step(n, scale=last, scale_after=last) for n in range(55, 61)]
    found = short_run(tmp_path, *skips, *taken)
    assert found[0].severity == "bad"
    assert found[0].text.startswith("54 of 60 steps were skipped (90 %, ")


def test_a_scale_that_grows_after_each_step_is_told(tmp_path):
    pairs = [
        (step(2 * n + 1, scale_after=2048.0), skip(2 * n + 2, 2048.0, scale_after=1024.0))
        for n in range(30)
    ]
    found = short_run(tmp_path, *(event for pair in pairs for event in pair))
    assert found[0].severity == "bad"
    assert "30 of 60 steps were skipped (50 %" in found[0].text


def nan_culprits(number: int, **values: int):
    return records.culprits(number, "head", num_nan=12, num_inf=0) | values


def test_nan_without_inf_is_not_said_to_be_normal(tmp_path):
    events = (skip(1, 4096.0), nan_culprits(1), skip(2, 2048.0), nan_culprits(2))
    (first,) = said(tmp_path, *events)
    assert first.severity == "warning"
    assert first.text == (
        "1 step (step 2) was skipped with NaN and no inf in the gradients, while the loss was "
        f"finite: the scale alone seldom does that. To find the op and its cure, run `{ADVICE}`."
    )


def test_inf_beside_nan_is_what_too_large_a_scale_does(tmp_path):
    (good,) = said(tmp_path, skip(1, 4096.0), nan_culprits(1, num_inf=1))
    assert "1 skipped, by dynamic scaling at the start" in good.text


def test_a_skip_that_a_diagnosis_explains_is_not_normal(tmp_path):
    found = said(tmp_path, skip(1, 4096.0), records.diagnosis(1, verdict="maths", ends=("x",)))
    assert found[0].severity == "bad"
    assert not any("dynamic scaling" in sentence.text for sentence in found)
    skipped = the_one(found, "1 of 100 steps was skipped (1 %, step 1)")
    assert "What helps" not in skipped.text


def test_most_gradients_nothing_but_zeros_are_bad(tmp_path):
    zero = counted({}, zeros=10)
    rows = [tensor("parameter_gradient", f"{name}.weight", zero) for name in "abcdef"]
    for number, severity in ((5, "warning"), (6, "bad")):
        found = said(tmp_path / severity, *(sample(n, rows[:number]) for n in (40, 50, 60)))
        assert the_one(found, "All gradient entries of `a.weight`").severity == severity


def test_skips_that_began_in_several_places(tmp_path):
    events = [(skip(n), records.culprits(n, m)) for n, m in ((50, "a"), (60, "b"), (70, "b"))]
    found = said(tmp_path, *(event for pair in events for event in pair))
    assert "; 2 of them began in `b`, others in `a`." in the_one(found, "were skipped").text


@pytest.mark.parametrize(
    ("numbers", "severity"),
    [([50], "notice"), ([50, 60], "warning"), (range(50, 70), "bad")],
)
def test_many_skips_are_worse_than_few(tmp_path, numbers, severity):
    found = said(tmp_path, *map(skip, numbers))
    assert the_one(found, "skipped (").severity == severity


def test_skips_that_do_not_end(tmp_path):
    found = said(tmp_path, *map(skip, range(91, 101)))
    assert (
        "(10 %, steps 91 to 100), up to 10 in a row. The skips do not end: the last 10 iterations "
        "were all skipped" in the_one(found, "do not end").text
    )
    assert found[0].severity == "bad"


def test_no_scale_helps(tmp_path):
    found = said(tmp_path, skip(50, 1.0, reason="non-finite at any scale"))
    sentence = the_one(found, "even at the smallest scale")
    assert sentence.severity == "bad"
    assert "(step 50)" in sentence.text
    assert "and NaN in the parameters." in sentence.text
    assert codes(sentence) == [ADVICE]


def test_skips_in_bf16_are_not_cured_by_a_scale(tmp_path):
    found = said(tmp_path, skip(50), skip(60), policy=records.policy("bfloat16"))
    assert "bf16 has the range of fp32, so no smaller scale helps" in found[0].text
    assert "max_scale" not in found[0].text
    assert the_one(found, "needs no GradScaler").severity == "notice"


def test_a_scale_that_fell_to_its_floor(tmp_path):
    found = said(tmp_path, step(1, scale=1024.0), step(100, scale=1.0, scale_after=1.0))
    assert the_one(found, "The scale fell from 2^10 to 1").severity == "bad"


@pytest.mark.parametrize("is_last", [False, True])
def test_a_step_before_a_trial_is_no_scale_that_fell(tmp_path, is_last):
    first = 100 if is_last else 50
    steps = [skip(first, 1024.0, scale_after=1.0)]
    steps += [step(n, scale=1.0, scale_after=512.0) for n in (51,) if not is_last]
    found = said(tmp_path, *steps)
    assert [sentence.severity for sentence in found] == ["good", "notice"]
    assert not [sentence for sentence in found if "fell" in sentence.text]


def test_a_scale_that_came_back_is_told_by_its_ends(tmp_path):
    found = said(tmp_path, step(50, scale=2048.0))
    assert "and the scale ended where it began, at 2^10; no gradient" in found[0].text


# --- the end, the loss ----------------------------------------------------------------------------


def test_a_loss_that_became_inf_first_did_not_become_nan(tmp_path):
    bad = [step(7, loss=math.inf), *(step(n, loss=math.nan) for n in range(8, 101))]
    text = the_one(said(tmp_path, *bad), "The loss became").text
    assert text.startswith("The loss became inf at step 7; 94 steps had such a loss")


def test_a_run_that_ended_with_an_error_and_a_loss_that_is_nan(tmp_path):
    loss, error, *_ = said_of(records.failed(tmp_path))
    assert (loss.follows, error.follows) == (False, True)
    assert error.text == (
        "The run ended after 9 steps, at 4.5 s, with an error: `ValueError: the loss is NaN`."
    )
    assert loss.text.startswith(
        "The loss became NaN at step 7; 3 steps had such a loss, including the last one."
    )
    assert {error.severity, loss.severity} == {"bad"}


def test_one_bad_loss_at_the_end(tmp_path):
    found = said(tmp_path, step(100, loss=math.nan))
    assert "at step 100; 1 step had such a loss, the last one." in found[0].text


def test_a_loss_that_recovered_is_a_warning(tmp_path):
    found = said(tmp_path, step(50, loss=math.inf))
    assert found[0].severity == "warning"
    assert "at step 50; 1 step had such a loss, and it recovered." in found[0].text


def test_a_run_whose_buffers_stay_nan_has_not_recovered(tmp_path):
    names = "bn.running_mean", "bn.running_var"
    skipped = skip(50, reason="loss", loss=math.nan)
    found = said(tmp_path, skipped, records.buffers(50, *names))
    buffers, loss = the_one(found, "buffers"), the_one(found, "The loss became")
    assert buffers.severity == "bad"
    assert not buffers.follows
    assert buffers.text.startswith(
        "2 buffers of the model became inf or NaN at step 50, which was skipped, and stayed so: "
        "`bn.running_mean` and `bn.running_var`."
    )
    assert codes(buffers)[2:] == [
        "GradScaler(module=model)",
        "guard(optimizer, module=model)",
        "reset_running_stats()",
    ]
    assert "recovered" not in loss.text


def test_buffers_are_named_though_the_step_was_taken(tmp_path):
    found = said(tmp_path, records.buffers(64, "queue"))
    assert "1 buffer of the model became inf or NaN by step 64, and" in found[0].text


def test_buffers_that_were_repaired_are_no_problem(tmp_path):
    found = said(tmp_path, records.buffers(50, "queue"), records.buffers(60))
    assert found[0].severity == "good"


def test_skips_for_a_loss_that_nobody_recorded(tmp_path):
    found = said(tmp_path, *(step(n, loss=None) for n in range(1, 50) if n != 7), *(
        step(n, loss=None) for n in range(50, 101)
    ), skip(7, reason="loss", loss=None))  # fmt: skip
    assert the_one(found, "before it was scaled").severity == "bad"


def test_ctrl_c_is_no_failure(tmp_path):
    found = said(tmp_path, records.end(50.0, 100, "KeyboardInterrupt"), end=False)
    assert [sentence.severity for sentence in found] == ["good", "notice"]
    assert "interrupted by hand after 100 steps" in found[1].text


def test_a_run_without_an_end_was_killed_or_is_running(tmp_path):
    found = said_of(records.killed(tmp_path))
    assert found[0].severity == "warning"
    assert "still running, or it was killed after 5 steps" in found[0].text
    assert the_one(found, "line 9 of rank0.jsonl is cut").severity == "notice"


def test_a_run_without_a_step(tmp_path):
    first, *_ = said_of(records.only_header(tmp_path))
    assert first.severity == "bad"
    assert first.text.startswith("No step of an optimizer was recorded")


def test_ranks_that_disagree_are_bad_and_missing_ones_told(tmp_path):
    (sentence,) = said_of(records.several_ranks(tmp_path / "a"))
    assert sentence.severity == "bad"
    assert "ranks disagree from step 20 on" in sentence.text
    found = said(tmp_path / "b", header=records.header(world_size=4))
    assert "Only 1 of 4 processes left a record" in found[1].text


# --- tensors --------------------------------------------------------------------------------------


def test_what_would_underflow_and_the_scale_that_would_lose_none(tmp_path):
    good, sentence = said_of(records.underflowing(tmp_path))
    assert (good.severity, sentence.severity) == ("good", "notice")  # it is in float32
    assert sentence.text == (
        "12 % of the gradient entries of `head.weight` would underflow in fp16 without a scaler; a "
        "scale of 2^15 to 2^16 would lose none."
    )


def test_what_was_flushed_is_not_known(tmp_path):
    (sentence,) = said_of(records.flushing(tmp_path))
    assert sentence.severity == "warning"
    assert sentence.text == (
        "12 % of the gradient entries of `head.weight` underflow at scale 2^10; the flushed "
        "values are unknown, but a scale of at least 2^11, up to 2^16, loses less. "
        "`halfstep.GradScaler(init_scale=2.0**16)`."
    )


def test_a_scale_that_has_grown_shows_what_was_flushed_before(tmp_path):
    (sentence,) = said_of(records.flushing(tmp_path, (1024.0, 1024.0, 65536.0)))
    assert sentence.text == (
        "8 % of the gradient entries of `head.weight` underflow at the scales of the samples (the "
        "last: 2^16); a scale of 2^12 to 2^16 would lose none. "
        "`halfstep.GradScaler(init_scale=2.0**16)`."
    )


def test_gradients_that_never_were_in_fp16_do_not_underflow(tmp_path):
    rows = [tensor("parameter_gradient", "norm.weight", records.norm_like())]
    (sentence,) = said(tmp_path, *(sample(n, rows) for n in (40, 50, 60)))
    assert sentence.severity == "good"
    assert sentence.text.endswith("no gradient underflows.")


def test_what_is_left_is_at_least_so_much_where_zeros_were_flushed(tmp_path):
    flushed = counted({0: 90}, zeros=10, flushed=10)
    rows = [tensor("parameter_gradient", "tail.weight", flushed)]
    high = [step(40, scale=16384.0), sample(40, rows, 16384.0), skip(41, 16384.0)]
    sentence = the_one(said(tmp_path, *high, sample(50, rows)), "underflow")
    assert re.search(
        r"; no scale keeps them all, and 2\^13 loses least, at least 0\.0\d+ % of all entries. "
        r"`halfstep\.GradScaler\(init_scale=2\.0\*\*13\)`",
        sentence.text,
    )


def test_where_no_larger_scale_is_possible_the_layer_may_leave_fp16(tmp_path):
    wide = counted({16: 40}, zeros=60, flushed=60)
    rows = [tensor("parameter_gradient", "tail.weight", wide)]
    found = said(tmp_path, *(sample(n, rows) for n in (40, 50, 60)))
    sentence = the_one(found, "underflow")
    assert sentence.severity == "bad"
    assert "a larger scale than 2^10 would overflow" in sentence.text
    assert codes(sentence)[-1] == island_of("tail")


def test_the_others_that_underflow_are_named(tmp_path):
    lossy = counted({0: 90}, zeros=10, flushed=10)
    rows = [tensor("parameter_gradient", f"{name}.weight", lossy) for name in "abcdef"]
    sentence = the_one(said(tmp_path, *(sample(n, rows) for n in (40, 50, 60))), "underflow")
    assert "`b.weight`, `c.weight`, `d.weight` and 2 more" in sentence.text


def test_outputs_close_to_overflow(tmp_path):
    near = [tensor("output", "head", counted({16: 1}), "float16")]
    far = [tensor("output", "norm", counted({17: 1}), "float32")]
    found = said(tmp_path, sample(40, near), sample(50, far))
    sentence = the_one(found, "came within 0.4 bits")
    assert "(step 40)" in sentence.text
    assert codes(sentence) == ["head", island_of("head")]


def test_outputs_and_weights_that_are_not_finite(tmp_path):
    rows = [
        tensor("output", "a", counted({0: 5}, inf=2), "float16"),
        tensor("output", "b", counted({0: 5}, nan=1), "float16"),
        tensor("parameter", "b.weight", counted({0: 5}, nan=3)),
    ]
    found = said(tmp_path, sample(40, rows))
    outputs = the_one(found, "The outputs of `a` contained 2 inf, first sampled at step 40")
    assert outputs.text.endswith("; `b` later in the model contained some too.")
    assert the_one(found, "The weights of `b.weight` contained 3 NaN").severity == "bad"


def test_rules_that_never_acted_are_no_rules_of_the_run(tmp_path):
    text = "standard; @nosuch:fp32; exp@head:fp32"
    assert not [s for s in said(tmp_path / "a", records.policy(text=text)) if "acted" in s.text]
    seen = [{"@nosuch:fp32": 0, "exp@head:fp32": 2}, {"@nosuch:fp32": 0, "exp@head:fp32": 0}]
    rules = [records.rules(step, calls) for step, calls in enumerate(seen, start=1)]
    sentence = the_one(said(tmp_path / "b", records.policy(text=text), *rules), "never acted")
    assert sentence.severity == "warning"
    assert sentence.text == (
        "`@nosuch:fp32` of the policy never acted: no op and no module was decided by it in 2 "
        "sampled steps. Compare the names with `model.named_modules()` and with the ops of "
        "`halfstep.trace`; a later rule may overrule an earlier one."
    )


def test_a_rule_whose_reason_is_known_is_named_once(tmp_path):
    text = "the policy's rule @nosuch:fp32 never acted: no module of this GPT is named like it"
    note = {"event": "note", "step": 100, "text": text}
    rules = records.rules(1, {"@nosuch:fp32": 0})
    sentence = the_one(said(tmp_path, rules, note), "never acted")
    assert (sentence.severity, sentence.text) == ("warning", f"{text}.")


def test_weights_that_fp16_cannot_hold(tmp_path):
    rows = [tensor("parameter", "head.weight", counted({20: 3, 0: 7}))]
    sentence = the_one(said(tmp_path, sample(40, rows)), "exceed the largest value of fp16")
    assert sentence.text.startswith("3 measured entries of `head.weight`")


def test_gradients_that_are_all_zero(tmp_path):
    rows = [tensor("parameter_gradient", "dead.weight", counted({}, zeros=8))]
    sentence = the_one(said(tmp_path, sample(40, rows)), "All gradient entries of `dead.weight`")
    assert sentence.severity == "warning"


def test_few_samples_and_none(tmp_path):
    steps = [step(n) for n in range(1, 51)]
    start = [records.header(), *steps]
    end = records.end(25.0, 50)
    _, none = said_of(records.write(tmp_path / "none", [*start, end]))
    assert none.text.startswith("No tensors were sampled")
    _, few = said_of(records.write(tmp_path / "few", [*start, sample(1, layers()), end]))
    assert few.text.startswith("Only 1 step of 50 was sampled")


# --- the form -------------------------------------------------------------------------------------


def test_the_worst_comes_first(tmp_path):
    found = said(
        tmp_path,
        records.note(1, "by the way"),
        skip(50),
        skip(60),
        records.end(1.0, 1, "Boom"),
        end=False,
    )
    assert [sentence.severity for sentence in found] == ["bad", "warning", "notice"]


def test_every_sentence_ends_with_a_full_stop_and_no_name_stands_bare(tmp_path):
    for write in (records.with_skips, records.failed, records.killed, records.hostile):
        for sentence in said_of(write(tmp_path / write.__name__)):
            assert re.search(r"[^.]\.$", sentence.text), sentence.text
            assert "None" not in sentence.text


def test_hostile_names_are_marked_and_stay_whole(tmp_path):
    found = said_of(records.hostile(tmp_path))
    assert records.HOSTILE in codes(the_one(found, "skipped ("))
    for sentence in found:
        outside = re.sub(r"(`+)(?!`).*?(?<!`)\1(?!`)", "", sentence.markdown)
        assert not re.search(r"(?<!\\)<", outside)


def test_a_sentence_as_text_and_as_markdown():
    sentence = say("bad", "1 < 2 in ", Code("a`b|c\n\x1b[31m"), ".")
    assert sentence.text == "1 < 2 in `a`b|c [31m`."
    assert sentence.markdown == "1 \\< 2 in `` a`b\\|c [31m ``."


def test_names_are_counted_when_there_are_many():
    def text(of):
        return say("good", *names(of)).text

    assert text("a") == "`a`"
    assert text("abc") == "`a`, `b` and `c`"
    assert text("abcde") == "`a`, `b`, `c` and 2 more"


def test_markup_from_outside_is_shown_as_it_is():
    assert plain("*a* [b](c) <i>\n|") == "\\*a\\* \\[b\\](c) \\<i\\> \\|"
    assert code("x``y") == "``` x``y ```"


# --- lost updates ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lost", "severity"), [(0.97, "bad"), (0.2, "warning"), (0.02, "notice"), (0.001, None)]
)
def test_lost_updates_are_named_with_the_cure(tmp_path, lost, severity):
    found = said_of(records.losing_updates(tmp_path, lost))
    if severity is None:
        assert found[0].text.endswith("; 0.1 % of the updates were lost to rounding.")
        return
    sentence = the_one(found, "updates were lost to rounding in bfloat16")
    assert sentence.severity == severity
    assert sentence.text.startswith(f"{lost * 100:.0f} % of the updates")
    cure = ['halfstep.master_weights(optimizer, store="split")'] if severity != "notice" else []
    assert codes(sentence) == ["blocks.1.mlp.weight", *cure]


def test_the_cure_of_float16_weights_is_another_store(tmp_path):
    found = said_of(records.losing_updates(tmp_path, dtype="float16"))
    sentence = the_one(found, "updates were lost to rounding in float16")
    assert codes(sentence)[1] == 'halfstep.master_weights(optimizer, store="float32")'


def test_no_master_weights_help_float32(tmp_path):
    found = said_of(records.losing_updates(tmp_path, dtype="float32"))
    sentence = the_one(found, "updates were lost to rounding in float32")
    assert sentence.severity == "notice"
    assert codes(sentence) == ["blocks.1.mlp.weight"]


def test_the_cure_runs(tmp_path):
    """The run that is told to keep master weights loses next to nothing with them."""
    said = []
    for folder in ("plain", "kept"):
        torch.manual_seed(0)
        model = torch.nn.Linear(32, 32, dtype=torch.bfloat16)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
        if folder == "kept":
            (call,) = [code for code in codes(said[0]) if "master_weights" in code]
            eval(call)
        with halfstep.record(tmp_path / folder, model=model, every=2):
            for _ in range(6):
                optimizer.zero_grad()
                model(torch.randn(8, 32, dtype=torch.bfloat16)).float().square().mean().backward()
                optimizer.step()
        said.append(the_one(said_of(tmp_path / folder), "of the updates"))
    assert [sentence.severity for sentence in said] == ["bad", "good"]


def test_a_few_steps_do_not_show_that_all_is_well(tmp_path):
    steps = [step(n, loss=4.0 - n / 10) for n in range(1, 11)]
    (few, *_) = short_run(tmp_path / "few", *steps[:9])
    assert few.text.startswith("Nothing bad was seen: 9 steps; none skipped; the loss went from")
    (enough, *_) = short_run(tmp_path / "enough", *steps)
    assert enough.text.startswith("All is well: 10 steps")
