"""What is said about a run: what happened, how bad it is, what to do, and what followed from it.

``golden/sentences.txt`` has every sentence of every run of ``RUNS``. After a change of what is
said, ``pytest tests/report --accept`` writes it anew, and its diff is what to review.
"""

import math
import re
from dataclasses import replace
from functools import partial

import pytest
import torch
from tests.report import records
from tests.report.records import (
    bad_op,
    bell,
    counted,
    diagnosis,
    layers,
    sample,
    skip,
    step,
    tensor,
)

import halfstep
from halfstep._common.text import Code, names, say
from halfstep._tools.diagnose.diagnosis import Cure
from halfstep._tools.line import Line
from halfstep._tools.record.read import read_run
from halfstep._tools.record.run import (
    HOOKS_AND_SCALE,
    OWN_PRECISION,
    PAST_THE_SCALER,
    TORCH_SCALER,
    WRONG_STEP,
)
from halfstep._tools.report.about_steps import MOST_PLACES
from halfstep._tools.report.summarize import summarize
from halfstep._tools.report.text import sentences, summary_row


def said_of(folder):
    return sentences(summarize(read_run(folder)))


def run(*events, header=None, policy=None, end=True):
    """Return a function that writes 100 steps and these events, sampled well."""
    numbers = {event["step"] for event in events if event["event"] == "step"}
    own = [event for event in events if event["event"] == "step"]
    steps = sorted([*map(step, {*range(1, 101)} - numbers), *own], key=lambda each: each["step"])
    others = [event for event in events if event["event"] != "step"]
    samples = [sample(n, layers()) for n in (10, 20, 30)]
    first = [header or records.header(), policy or records.policy(), records.model_event()]
    last = [records.end(50.0, 100)] if end else []
    return partial(records.write, events=[*first, *steps, *samples, *others, *last])


def said(folder, *events, **given):
    return said_of(run(*events, **given)(folder))


def sampled(*rows):
    """Return a run in which these tensors were sampled three times."""
    return run(*(sample(n, [tensor(*row) for row in rows]) for n in (40, 50, 60)))


def short(*steps):
    """Return a run of these steps alone."""
    end = records.end(1.0, len({each["step"] for each in steps}))
    return partial(records.write, events=[records.header(), records.policy(), *steps, end])


def unscaled(row, *policy):
    """Return a run without a scaler, every step of which was sampled."""
    events = [step(n, scale=None, scale_after=None) for n in range(1, 61)]
    samples = [sample(n, [tensor(*row)], 1.0) for n in (1, 20, 40)]
    first = [records.header(), records.model_event(), *policy]
    return partial(records.write, events=[*first, *events, *samples, records.end(30.0, 60)])


def gradient(statistics, name="head", dtype="float32"):
    return "parameter_gradient", f"{name}.weight", statistics, dtype


def output(statistics, name="head", dtype="float16"):
    return tensor("output", name, statistics, dtype)


def taken(number, scale, **values):
    return step(number, scale=scale, scale_after=scale, **values)


def went_bad(**values):
    """Return a run whose loss was inf in step 50, which was diagnosed."""
    return run(skip(50, reason="loss"), diagnosis(50, **values))


def poisoned(*extra):
    """Return a run whose loss stays NaN from step 20 on, and poisons the weights."""
    nan = counted({}, nan=9)
    rows = [output(nan), tensor("parameter", "head.weight", nan)]
    return run(
        *(step(n, loss=math.nan, norm=math.nan) for n in range(20, 101)), sample(50, rows), *extra
    )


def nan_losses(first):
    return [step(n, loss=math.nan) for n in range(first, 101)]


def restless(backoff):
    """Return a run that skips nearly all steps."""
    scales = [2.0**30 * backoff**n for n in range(55)]
    skips = [skip(n, s, scale_after=s * backoff) for n, s in enumerate(scales[:-1], start=1)]
    return short(*skips, *(taken(n, scales[-1]) for n in range(55, 61)))


LOSSY = counted({-30: 330, -5: 670})
FLUSHED = counted({0: 90}, zeros=10, flushed=10)
BUFFERS = "bn.running_mean", "bn.running_var"
BAD_LOSS = {"reason": "loss", "loss": math.nan}
BOTH_RULES = "torch; mul:fp32; add:fp32"
OVERFLOW, SMALLEST = "overflow", "non-finite down to min_scale"
IDLE = "the policy's rule @nosuch:fp32 never acted: no module of this GPT is named like it"
FLUSHED_AT_16K = [
    step(40, scale=16384.0),
    sample(40, [tensor(*gradient(FLUSHED, "tail"))], 16384.0),
]
WATCHED = {"event": "device", "step": 1, "device": "cpu", "machine": "a CPU"}

LOST = counted({0: 100}, updates=100, lost_updates=90)
LOSING = [
    output(counted({0: 9}, inf=3)),
    tensor("parameter", "head.weight", LOST, "bfloat16"),
]

RUNS = {
    "healthy": records.healthy,
    "bf16": records.bf16,
    "with skips": records.with_skips,
    "failed": records.failed,
    "diagnosed": records.diagnosed,
    "killed": records.killed,
    "only a header": records.only_header,
    "ranks that disagree": records.several_ranks,
    "underflowing": records.underflowing,
    "flushing": records.flushing,
    "flushing until the scale has grown": partial(
        records.flushing, scales=(1024.0, 1024.0, 65536.0)
    ),
    "1 of 4 ranks": run(header=records.header(world_size=4)),
    "skips at the start": run(skip(1, 4096.0), skip(2, 2048.0)),
    "a bad loss after a skip at the start": run(skip(1, 4096.0), skip(2, 2048.0, loss=math.nan)),
    "gradients of no loss": short(*(step(n, loss=None, norm=math.nan) for n in range(8, 21))),
    "a note": run(records.note(3, "the model is compiled")),
    "a note that was cut, of a guard": short(
        step(1, scale=1.0, scale_after=1.0), records.note(1, "the program printed a text, at ...")
    ),
    "a note after the last step": run(records.note(101, "the masters have kept them")),
    "one step": short(step(1)),
    "sampling off, and scaled in vain": partial(
        records.write, events=[records.header(every=0), step(1), records.products(1, float32=3)]
    ),
    "nine steps": short(*(step(n, loss=4.0 - n / 10) for n in range(1, 10))),
    "ten steps": short(*(step(n, loss=4.0 - n / 10) for n in range(1, 11))),
    "one sample": short(*(step(n) for n in range(1, 51)), sample(1, layers())),
    # Without a scaler.
    "float32 would underflow": unscaled(gradient(LOSSY)),
    "an autocast to float32 would underflow": unscaled(gradient(LOSSY), records.policy("float32")),
    "float32 would not underflow": unscaled(gradient(bell(-3))),
    "half parameters underflow": unscaled(gradient(LOSSY, dtype="float16")),
    # Skips.
    "a scale that a GradScaler can have": run(
        *(event for n in (50, 60) for event in (skip(n), step(n + 1)))
    ),
    **{
        f"skips of the module {module!r}": run(
            skip(50), records.culprits(50, module), skip(51), skip(52)
        )
        for module in ("", "(model)", "Critic[1].fc", "a b;c")  # no rule can name it
    },
    "a skip after growth": run(
        *(taken(n, 2048.0) for n in (50, 51)), skip(52, 2048.0), records.culprits(52, "head")
    ),
    "a scale that goes back in two stairs": run(
        *(taken(n, 2048.0) for n in (50, 51)),
        *(taken(n, 4096.0) for n in (52, 53)),
        *(skip(54, 4096.0), taken(55, 2048.0), skip(56, 2048.0)),
    ),
    "a scale below where it grew": run(taken(50, 2048.0), skip(51, 2048.0), skip(52, 1024.0)),
    "one skip, then the end": short(skip(1, 65536.0)),
    "nearly all skipped": restless(0.5),
    "nearly all skipped, with a factor of 0.99": restless(0.99),
    "a scale that grows after each step": short(
        *(
            event
            for n in range(30)
            for event in (
                step(2 * n + 1, scale_after=2048.0),
                skip(2 * n + 2, 2048.0, scale_after=1024.0),
            )
        )
    ),
    "an explained skip": run(skip(1, 4096.0), diagnosis(1, verdict="maths", ends=("x",))),
    "skips that began in several places": run(
        *(
            event
            for n, module in ((50, "a"), (60, "b"), (70, "b"), (80, ""), (90, "c"), (95, "d"))
            for event in (skip(n), records.culprits(n, module))
        )
    ),
    "a skip": run(skip(50)),
    "two skips": run(skip(50), skip(60)),
    "twenty skips": run(*map(skip, range(50, 70))),
    "skips that do not end": run(*map(skip, range(91, 101))),
    "skips at a scale that does not move": run(
        *(skip(n, scale_after=1024.0) for n in range(91, 101))
    ),
    "a skip at the smallest scale": run(skip(50, 1.0, reason=SMALLEST)),
    "skips from the first step to the last, twice down to the smallest scale": short(
        *(
            skip(n, 2.0 ** (16 - (n - 1) % 17), SMALLEST if n > 16 else OVERFLOW)
            for n in range(1, 33)
        )
    ),
    "a scale of 2^-7, and a trial": short(
        *(skip(n, 2.0 ** (17 - n), scale_after=2.0 ** (16 - n)) for n in range(1, 24)),
        step(24, scale=2.0**-7, scale_after=2.0**16),
        skip(25, 2.0**16, scale_after=2.0**-7),
        *(taken(n, 2.0**-7) for n in range(26, 101)),
    ),
    "skips in bf16": run(skip(50), skip(60), policy=records.policy("bfloat16")),
    "a scale that run added in bf16": run(
        policy=records.policy("bfloat16"),
        header=records.header(run_as=("halfstep", "run", "--amp=fp16", "train.py")),
    ),
    "a scale that fell to its floor": run(step(1, scale=1024.0), taken(100, 1.0)),
    "a scale that came back": run(step(50, scale=2048.0)),
    "one overflow in a short run": short(
        *(taken(n, 2.0**16) for n in range(1, 19)), skip(19, 2.0**16), taken(20, 2.0**15)
    ),
    "steps that the script left out": run(
        *(skip(n, reason="left out by the script", scale_after=1024.0) for n in range(30, 50))
    ),
    "two rules of one command": run(
        *(
            diagnosis(n, bad=bad_op(name=op), cure=Cure("policy", rule, True, policy=rule))
            for n, op, rule in ((5, "mul", "torch; mul:fp32"), (9, "add", BOTH_RULES))
        )
    ),
    "a bad step that was skipped": short(
        *(step(n) for n in range(1, 20)), skip(20, **BAD_LOSS), step(21), diagnosis(20)
    ),
    # Losses, buffers, the end.
    "the losses of a GAN": short(
        *(
            step(n, optimizer="Adam", number=2 - n % 2, loss=float(n if n % 2 else 100 - n))
            for n in range(1, 61)
        )
    ),
    "one loss of two optimizers": short(
        *(
            step((n + 1) // 2, optimizer="Adam", number=2 - n % 2, loss=41.0 - (n + 1) // 2)
            for n in range(1, 61)
        )
    ),
    "inf, then NaN": run(step(7, loss=math.inf), *nan_losses(8)),
    "NaN at the end": run(step(100, loss=math.nan)),
    "inf, and it recovered": run(step(50, loss=math.inf)),
    "NaN, and buffers that stay so": run(skip(50, **BAD_LOSS), records.buffers(50, *BUFFERS)),
    "buffers of a step that was taken": run(records.buffers(64, "queue")),
    "buffers that were repaired": run(records.buffers(50, "queue"), records.buffers(60)),
    "a skip for a loss that nobody recorded": run(
        *(step(n, loss=None) for n in range(1, 101) if n != 7), skip(7, reason="loss", loss=None)
    ),
    "Ctrl-C": run(records.end(50.0, 100, "KeyboardInterrupt"), end=False),
    "Ctrl-C before a step": partial(
        records.write, events=[records.header(), records.end(1.0, 0, "KeyboardInterrupt")]
    ),
    "no step": partial(records.write, events=[records.header(), records.end(1.0, 0)]),
    "an error, skips and a note": run(
        *(records.note(1, "by the way"), skip(50), skip(60), records.end(1.0, 1, "Boom")), end=False
    ),
    # Tensors.
    "zeros of a sum of several passes": sampled(gradient(counted({-8: 2999}, zeros=1), "tail")),
    "zeros of many causes": sampled(gradient(counted({0: 67}, zeros=33, flushed=0), "tail")),
    "five gradients of zeros": sampled(
        *(gradient(counted({}, zeros=10), each) for each in "abcde")
    ),
    "six gradients of zeros": sampled(
        *(gradient(counted({}, zeros=10), each) for each in "abcdef")
    ),
    "gradients that never were in fp16": sampled(gradient(records.norm_like(), "norm")),
    "what no scale keeps": run(
        *FLUSHED_AT_16K, skip(41, 16384.0), sample(50, [tensor(*gradient(FLUSHED, "tail"))])
    ),
    "no larger scale is possible": sampled(
        gradient(counted({16: 40}, zeros=60, flushed=60), "tail")
    ),
    "several gradients underflow": sampled(*(gradient(FLUSHED, each) for each in "abcdef")),
    "the gradients of an output would underflow": sampled(
        ("output_gradient", "tail", counted({-40: 5, 1: 5}), "float32")
    ),
    "outputs close to overflow": run(
        sample(40, [output(counted({16: 1}))]),
        sample(50, [output(counted({17: 1}), "norm", "float32")]),
    ),
    "outputs and weights that are not finite": run(
        sample(
            40,
            [
                output(counted({0: 5}, inf=2), "a"),
                output(counted({0: 5}, nan=1), "b"),
                tensor("parameter", "b.weight", counted({0: 5}, nan=3)),
            ],
        )
    ),
    "one of two optimizers is skipped": short(
        *(
            each
            for n in range(1, 31)
            for each in (
                taken(n, 2.0**-n),
                skip(n, 2.0**-n, optimizer="SGD") if n > 18 else taken(n, 2.0**-n, optimizer="SGD"),
            )
        )
    ),
    "weights that fp16 cannot hold": run(
        sample(40, [tensor("parameter", "head.weight", counted({20: 3, 0: 7}))])
    ),
    "five weights that fp16 cannot hold": run(
        sample(
            40,
            [tensor("parameter", f"{n}.weight", counted({20 + n % 3: 1, 0: 7})) for n in range(5)],
        )
    ),
    "a rule that never acted": run(records.note(100, IDLE)),
    **{
        f"{share:.1%} of the updates lost": partial(records.losing_updates, lost=share)
        for share in (0.97, 0.2, 0.02, 0.001)
    },
    "updates lost in float16": partial(records.losing_updates, dtype="float16"),
    "updates lost in float32": partial(records.losing_updates, dtype="float32"),
    # Diagnoses.
    "a range": went_bad(),
    "a scale": went_bad(verdict="scale"),
    "maths": went_bad(verdict="maths"),
    "an unknown reason": went_bad(verdict="unknown", notes=("a note",)),
    "an unknown op": went_bad(verdict="unknown", bad=None),
    "data": went_bad(verdict="data", tensor="x[0]"),
    "a cast for an op": went_bad(bad=bad_op(op="_to_copy")),
    "a cast": went_bad(bad=bad_op(op="_to_copy", name="_to_copy")),
    "no module and no line": went_bad(bad=bad_op(module="", line=None)),
    "a backward pass": went_bad(
        bad=bad_op(phase="backward", line=None, forward_line=Line("a/b.py", 7, "f", ""))
    ),
    "no cure": went_bad(cure=None),
    "a cure that was not tried": went_bad(cure=Cure("code", "x + 1\nclip, too\nand wait")),
    "a cure of one call in several lines": went_bad(cure=Cure("code", "y = f(\n    x + 1,\n)")),
    "a cure that is not enough": went_bad(cure=Cure("code", "x + 1", is_finite=False)),
    "a cure in words": went_bad(cure=Cure("data", "check first:\nleave it out\nor fix it")),
    "a finite replay": went_bad(verdict="none", bad=None, cure=None, notes=("no luck",)),
    "another rank": went_bad(verdict="none", bad=None, cure=None, happened="its own is finite"),
    "many places": run(
        *(diagnosis(n, bad=bad_op(module=f"m{n}"), cure=None) for n in range(1, MOST_PLACES + 3))
    ),
    "a scale that was too large at the start": run(
        skip(1, 4096.0), diagnosis(1, verdict="scale", ends=("head.weight",))
    ),
    "a scale that was too large": run(
        skip(50), diagnosis(50, verdict="scale", ends=("head.weight",))
    ),
    "a scale that was too large, twenty times": run(
        *map(skip, range(50, 70)), diagnosis(50, verdict="scale", ends=("head.weight",))
    ),
    "too large a scale, taken": run(diagnosis(50, verdict="scale", ends=("head.weight",))),
    "skips at the smallest scale": run(*(skip(n, 1.0, SMALLEST) for n in range(50, 60))),
    "skips at the smallest scale, with a diagnosis": run(
        *(skip(n, 1.0, SMALLEST) for n in range(50, 60)),
        *(diagnosis(n, verdict="maths") for n in range(50, 60)),
    ),
    "bad from the first step": short(
        *(step(n, loss=math.nan) for n in range(1, 21)),
        sample(20, [tensor("parameter", "head.weight", counted({}, nan=9))]),
        *(records.buffers(n, *BUFFERS[:n]) for n in (1, 2)),
    ),
    "inf, and other skips": run(step(50, loss=math.inf), *map(skip, range(60, 70))),
    "skips, watched without a diagnosis": run(
        WATCHED | {"is_diagnosing": False}, skip(50, reason="loss"), skip(60)
    ),
    "skips, watched": run(WATCHED | {"is_diagnosing": True}, skip(50, reason="loss"), skip(60)),
    "a step that could not be replayed": run(
        WATCHED | {"is_diagnosing": True},
        skip(50, reason="loss"),
        records.note(101, "step 50 was not replayed: the model is sharded"),
    ),
    "NaN, and its diagnosis": run(step(50, loss=math.nan), diagnosis(50)),
    # What followed.
    "NaN everywhere": poisoned(),
    "NaN everywhere, with a diagnosis": poisoned(diagnosis(20)),
    "a bad weight that a later diagnosis finds": poisoned(
        diagnosis(20), diagnosis(60, verdict="data", tensor="head.weight", cure=None)
    ),
    "close to overflow after NaN": run(
        *nan_losses(20), sample(50, [output(counted({16: 8}, nan=2))]), diagnosis(20)
    ),
    "close to overflow before NaN": run(
        sample(10, [output(counted({16: 8}, nan=2))]), *nan_losses(20), diagnosis(20)
    ),
    "an output that overflowed": run(
        *nan_losses(31), sample(40, [output(counted({15: 8}, inf=2), "embed")])
    ),
    "an output that overflowed before NaN": run(
        sample(10, [output(counted({15: 8}, inf=2), "embed")]), step(100, loss=math.nan)
    ),
    "an output that overflowed, and no NaN": run(
        sample(10, [output(counted({15: 8}, inf=2), "embed")]), step(100, loss=1.0)
    ),
    "skips of a bad loss": run(*(skip(n, **BAD_LOSS) for n in (50, 60))),
    "twenty skips of a bad loss": run(*(skip(n, **BAD_LOSS) for n in range(50, 70))),
    "a skip of a bad loss, and others": run(skip(50, **BAD_LOSS), *map(skip, range(60, 66))),
    "a bad loss, and skips": run(step(50, loss=math.inf), *map(skip, range(60, 66))),
    # A step before a trial is no scale that fell.
    "a scale at its floor, and a trial of an earlier one": run(
        skip(50, 1024.0, scale_after=1.0), step(51, scale=1.0, scale_after=512.0)
    ),
    "a scale at its floor in the last step": run(skip(100, 1024.0, scale_after=1.0)),
    "steps that could not be written": run(records.end(9.0, 300), end=False),
    # Advice repeats the command that was run.
    **{
        f"NaN, run as {command!r}": run(
            *(
                step(n, loss=math.nan, norm=norm, scale=None, scale_after=None)
                for n in range(1, 101)
            ),
            header=records.header(run_as=command.split()),
        )
        for command, norm in (
            *(("", math.nan), ("halfstep run --amp=fp16 -m a.train", math.nan)),
            *(("torchrun ... -m halfstep run t.py --guard", math.nan), ("halfstep run f.py", 1.0)),
        )
    },
    **{
        f"cures of a run as {command!r}": run(
            *(step(40, share_lost_updates=0.9, norm=math.nan), sample(40, LOSING)),
            records.buffers(50, "bn.mean"),
            header=records.header(run_as=command.split()),
        )
        for command in ("", "halfstep run --policy=standard train.py")
    },
    "a step that a guard skipped for its loss": short(
        *(step(n, scale=1.0, scale_after=1.0) for n in range(1, 30)),
        *(skip(30, 1.0, SMALLEST, loss=math.nan), records.culprits(30, "head")),
    ),
    "an optimizer that spoils the model of another": short(
        *(step(n, loss=math.nan, norm=math.nan) for n in range(1, 20)),
        *(sample(1, layers()), diagnosis(1, verdict="optimizer", ends=()), records.buffers(3, "b")),
    ),
    "a loss that does not change": run(*(step(n, loss=2.0) for n in range(1, 101))),
    "a loss with a peak": run(step(50, loss=1.5e21)),
    "one of two losses that rose in the last two steps": run(
        *(
            step(n, optimizer="Adam", number=m, loss=735.0 if m == 2 and n > 99 else 9.0)
            for n in range(1, 102)
            for m in (1, 2)
        )
    ),
    "a loss that rose at once": run(*(step(n, loss=7e3 - n) for n in range(2, 101))),
    # Nothing is fine in a run with a note on its gradients.
    **{
        f"a note of gradients: {noted}": run(records.note(2, f"rank 1: {noted}: fc"))
        for noted in (HOOKS_AND_SCALE, PAST_THE_SCALER, TORCH_SCALER, WRONG_STEP)
    },
}


def test_what_is_said(tmp_path, golden):
    parts = []
    for number, (name, write) in enumerate(RUNS.items()):
        parts.append(f"== {name}\n")
        for sentence in said_of(write(tmp_path / str(number))):
            kind = sentence.severity + ", followed" * sentence.follows
            kind += ", with a cure" * bool(sentence.cure)
            parts.append(f"{kind}: {sentence.text}\n")
        parts.append("\n")
    golden("sentences.txt", "".join(parts))


@pytest.mark.parametrize("name", RUNS)
def test_no_cure_where_the_verdict_is_good_and_none_twice(tmp_path, name):
    found = said_of(RUNS[name](tmp_path))
    cures = [sentence.cure for sentence in found if sentence.cure]
    assert len(set(cures)) == len(cures)
    assert all(
        each.severity in ("bad", "warning") and not each.follows for each in found if each.cure
    )
    assert any(not sentence.follows for sentence in found)
    for sentence in found:
        assert re.search(r"([^.]| \.\.)\.$", sentence.text), sentence.text
        assert "None" not in sentence.text


def the_one(found, words):
    (sentence,) = [sentence for sentence in found if words in sentence.text]
    return sentence


def codes(sentence):
    return [part.text for part in sentence.parts if isinstance(part, Code)]


def test_the_cures_are_calls_that_work(tmp_path):
    _, island, _ = codes(said_of(records.with_skips(tmp_path / "a"))[0])
    model = torch.nn.Module()
    parts = [torch.nn.ModuleDict({"attn": torch.nn.Linear(2, 2)}) for _ in range(2)]
    model.blocks = torch.nn.ModuleList(parts)
    names = {"halfstep": halfstep, "model": model}
    with eval(island.replace("...", '"cpu", torch.float16'), names | {"torch": torch}):
        x = torch.ones(1, 2)
        assert model.blocks[0]["attn"](x).dtype is torch.float16
        assert model.blocks[1]["attn"](x).dtype is torch.float32
    call, _ = codes(said_of(RUNS["a scale that a GradScaler can have"](tmp_path / "b"))[0])
    assert eval(call, {"halfstep": halfstep}).get_scale() == 512.0


def test_each_skipped_step_is_counted_once_with_several_optimizers(tmp_path):
    pairs = [(skip(n, 2.0**n), skip(n, 2.0**n, optimizer="SGD")) for n in (3, 2, 1)]
    last = [taken(n, 1.0) for n in range(4, 40)]
    path = records.write(tmp_path, [records.header(), *sum(pairs, ()), *last])
    steps = summarize(read_run(path)).steps
    assert (len(steps.start_up), steps.after_growth, steps.num_skipped_later) == (3, (), 0)


def test_ranks_are_put_together(tmp_path):
    for rank in range(5):
        events = [records.header(rank=rank, world_size=5), step(1), step(2)]
        if rank in (0, 3):
            events.append(diagnosis(2, rank=rank))
        if rank == 4:
            events.append(diagnosis(1, verdict="maths"))  # "rank": 0, as old records had
        records.write(tmp_path, [*events, records.end(1.0, 2)], rank)
    found = said_of(tmp_path)
    the_one(found, "Step 2 on ranks 0 and 3 went bad: `linear`")
    the_one(found, "Step 1 on rank 4 went bad: `linear`")


def test_hostile_names_are_marked_and_stay_whole(tmp_path):
    found = said_of(records.hostile(tmp_path))
    assert records.HOSTILE in codes(the_one(found, "skipped ("))
    data = the_one(found, "was not finite before the step")
    assert codes(data).count(records.HOSTILE) == 3


def test_the_line_of_a_process_has_its_verdict_before_notices(tmp_path):
    summary = summarize(read_run(run(records.note(1, "it warned"))(tmp_path)))
    assert summary_row(summary)[-1].startswith("good: Precision: fine.")


def test_a_sentence_is_one_line_without_control_characters():
    sentence = say("bad", "1 < 2 in ", Code("a`b|c\n\x1b[31m"), ".")
    assert sentence.text == "1 < 2 in `a`b|c [31m`."


def test_names_are_counted_when_there_are_many():
    def text(of, num=0):
        return say("good", *names(of, num=num)).text

    assert text("a") == "`a`"
    assert text("abc") == "`a`, `b` and `c`"
    assert text("abcde") == text("abcd", num=5) == "`a`, `b`, `c` and 2 more"


def test_the_cure_of_lost_updates_runs(tmp_path):
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
        said.append(the_one(said_of(tmp_path / folder), "updates were lost"))
    assert [sentence.severity for sentence in said] == ["bad", "good"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("six gradients of zeros", "underflow,"),
        ("an output that overflowed", "that module in float32"),
        ("an output that overflowed, and no NaN", "it in float32"),
        *(("the losses of a GAN", "a run in float32"), ("NaN, run as ''", "should run in float32")),
    ],
)
def test_what_ran_in_no_lower_precision_is_not_told_to_run_in_float32(tmp_path, name, words):
    summary = summarize(read_run(RUNS[name](tmp_path)))
    texts = (sentences(replace(summary, products=x)) for x in ({"float16": 3}, {"float32": 3}))
    assert [any(words in each.text for each in found) for found in texts] == [True, False]


def test_a_forward_pass_outside_of_autocast_is_the_first_sentence(tmp_path):
    summary = summarize(read_run(records.healthy(tmp_path)))
    first, *_ = sentences(replace(summary, products={"float32": 3}))
    assert first.severity == "warning"
    assert first.text.startswith(
        "No product with gradients ran in a lower precision (products: float32), although autocast "
        "was on"
    )


@pytest.mark.parametrize("options", [(), ("--amp=bf16",), ("--amp=fp16",)])
def test_a_run_that_was_to_be_lowered_and_was_not_is_a_warning(tmp_path, options):
    """A script that calls model.forward(x) is not seen by --amp."""
    header = records.header(run_as=("halfstep", "run", *options, "train.py"))
    steps = (step(n, scale=None, scale_after=None) for n in range(1, 21))
    events = [header, records.products(1, float32=3), *steps, records.end(10.0, 20)]
    first, *_ = said_of(records.write(tmp_path, events))
    assert first.text.startswith("No product with gradients ran in a lower precision")
    assert ("although --amp was given" in first.text) == bool(options)
    assert first.severity == ("warning" if options else "notice")


def test_cures_of_what_run_scales_name_no_scaler(tmp_path):
    header = records.header(run_as=("halfstep", "run", "--amp=fp16", "train.py"))
    found = said(tmp_path, *FLUSHED_AT_16K, skip(50), skip(60), header=header)
    given = {code for each in found for code in codes(each)}
    assert "halfstep run --amp=bf16 train.py" in given
    assert not any("GradScaler" in code for code in given)


def test_cures_of_a_script_that_keeps_its_precision_are_not_options_of_amp(tmp_path):
    header = records.header(run_as=("halfstep", "run", "--amp=fp16", "train.py"))
    own = records.note(1, f"--amp fp16: {OWN_PRECISION} GradScaler")
    found = said(tmp_path, *FLUSHED_AT_16K, skip(50), skip(60), own, header=header)
    assert any(" use bf16 where the device has it." in each.cure for each in found)
    assert not any("--amp=bf16" in code for each in found for code in codes(each))


def test_one_checkpoint_is_advised_if_weights_and_buffers_are_bad(tmp_path):
    bad = sample(50, [tensor("parameter", "head.weight", counted({0: 3}, nan=9))])
    found = said_of(run(*nan_losses(50), records.buffers(50, *BUFFERS), bad)(tmp_path))
    assert "restore a checkpoint from before step 49" in the_one(found, "cannot be recovered").text
    assert not any(word in the_one(found, "buffers").text for word in ("checkpoint", "reset"))
