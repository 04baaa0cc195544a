"""Made-up records, written as the recorder writes them: what all tests of the report read.

``write`` puts events into a folder; the functions that end the file each write one whole run.
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from msgspec.structs import asdict, replace

from halfstep._common.formats import FORMATS
from halfstep._tools.diagnose.diagnosis import BadOp, Cure, Diagnosis, Operand
from halfstep._tools.line import Line
from halfstep._tools.record.files import LineWriter, file_of
from halfstep._tools.record.read import read_run
from halfstep._tools.report.summarize import summarize
from halfstep._tools.report.summary import Summary
from halfstep._tools.statistics import Statistics, binned

HOSTILE = "</script><img src=x onerror=alert(1)>"
LAYERS = ("embed", "blocks.0.attn", "blocks.0.mlp", "blocks.1.attn", "blocks.1.mlp", "head")
DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
Event = dict[str, Any]


def write(folder: Path, events: Iterable[Event], rank: int = 0) -> Path:
    writer = LineWriter(file_of(folder, rank))
    for event in events:
        writer.write(event)
        if event["event"] == "policy":  # it acted
            writer.write(products(event["step"], **{event["dtype"]: 24, "float32": 1}))
    writer.close()
    return folder


# --- events ---------------------------------------------------------------------------------------


def header(**values: Any) -> Event:
    return {
        "event": "run",
        "schema": 1,
        "halfstep": "0.1.0",
        "torch": "2.13.0+cpu",
        "python": "3.11.7",
        "rank": 0,
        "world_size": 1,
        "device": "cpu",
        "machine": "AMD EPYC 7B13",
        "cores": 2,
        "started": "2026-01-01T00:00:00+00:00",
        "command": ["train.py", "--lr", "1e-3"],
        "every": 10,
    } | values


def model_event(modules: Iterable[str] = LAYERS, **values: Any) -> Event:
    return {
        "event": "model",
        "step": 1,
        "name": "GPT",
        "parameters": 43_000_000,
        "modules": list(modules),
    } | values


def policy(dtype: str = "float16", text: str = "standard", **values: Any) -> Event:
    return {"event": "policy", "step": 1, "device": "cpu", "dtype": dtype, "text": text} | values


def products(number: int, **num: int) -> Event:
    return {"event": "products", "step": number, "num": num}


def step(number: int, /, **values: Any) -> Event:
    return {
        "event": "step",
        "step": number,
        "time": number / 2,
        "optimizer": "AdamW",
        "taken": True,
        "reason": None,
        "scale": 1024.0,
        "scale_after": 1024.0,
        "norm": 1.25,
        "loss": 2.0 + 2.0 / number,
    } | values


def skip(number: int, scale: float = 1024.0, reason: str = "overflow", **values: Any) -> Event:
    after = scale / 2 if reason == "overflow" else scale
    return step(
        number,
        taken=False,
        reason=reason,
        **{"scale": scale, "scale_after": after, "norm": math.inf} | values,
    )


def culprits(number: int, module: str | None, **values: Any) -> Event:
    return {
        "event": "culprits",
        "step": number,
        "optimizer": "AdamW",
        "began_in": module,
        "parameters": [f"{module}.weight"] if module else ["0.weight"],
        "num_parameters": 1,
    } | values


def buffers(number: int, *names: str) -> Event:
    return {"event": "buffers", "step": number, "names": names, "num_buffers": len(names)}


CURE = Cure(
    "policy",
    'autocast(..., policy="standard; linear@blocks.1.mlp:fp32")',
    is_finite=True,
    trial="20 steps of SGD on this batch",
    losses=(3.0, 2.5),
    remarks=("square runs the op pow",),
)


def bad_op(**values: Any) -> BadOp:
    given = {
        "op": "addmm",
        "name": "linear",
        "module": "blocks.1.mlp",
        "call": 1,
        "phase": "forward",
        "rule": "linear:lower",
        "line": Line("/home/me/model.py", 31, "forward", "x = self.mlp(x)"),
        "forward_op": None,
        "forward_line": None,
        "inputs": (Operand("", "float16", (32, 64), -900.0, 1200.0, 0, 0, 0),),
        "output": Operand("", "float16", (32, 8), -100.0, 60000.0, 0, 3, 0),
        "needs": 97280.0,
        "limit": 65504.0,
    }
    return BadOp(**given | values)


def found(**values: Any) -> Diagnosis:
    """Return a diagnosis, by default of a linear that needs a wider dtype than float16."""
    given = {"verdict": "range", "bad": bad_op(), "ends": ("loss",), "scale": 1024.0, "cure": CURE}
    return Diagnosis(**given | values)


def diagnosis(number: int, **values: Any) -> Event:
    return {"event": "diagnosis", "step": number, **dataclasses.asdict(found(**values))}


def sample(number: int, tensors: Iterable[Event], scale: float = 1024.0) -> Event:
    return {
        "event": "sample",
        "step": number,
        "scale": scale,
        "tensors": [_moved(each, number) for each in tensors],
    }


def _moved(tensor: Event, number: int) -> Event:
    """Let the smallest entry of a weight grow a little from sample to sample."""
    if tensor["kind"] != "parameter" or tensor["amin"] is None:
        return tensor
    return tensor | {"amin": tensor["amin"] * (1 + 2.0**-40 * number)}


def tensor(kind: str, name: str, statistics: Statistics, dtype: str = "float32") -> Event:
    return {"kind": kind, "name": name, "dtype": dtype} | asdict(statistics)


def note(number: int, text: str) -> Event:
    return {"event": "note", "step": number, "text": text}


def end(seconds: float, num_steps: int, error: str | None = None) -> Event:
    return {"event": "end", "time": seconds, "steps": num_steps, "error": error}


# --- statistics -----------------------------------------------------------------------------------


def counted(histogram: Mapping[int, int], **values: Any) -> Statistics:
    """Return statistics that fit a histogram; values are three quarters of the end of their bin."""
    entries = sum(histogram.values()) + sum(values.get(key, 0) for key in ("zeros", "nan", "inf"))
    magnitudes = {0.75 * 2.0**exponent: count for exponent, count in histogram.items()}
    formats = FORMATS.items()
    first, counts = binned(histogram)
    return Statistics(
        **{
            "size": entries,
            "measured": entries,
            "zeros": 0,
            "nan": 0,
            "inf": 0,
            "amax": max(magnitudes, default=0.0),
            "amin": min(magnitudes, default=None),
            "first": first,
            "histogram": counts,
            "underflow": {
                name: sum(n for x, n in magnitudes.items() if x <= format.flushed_below)
                for name, format in formats
            },
            "overflow": {
                name: sum(n for x, n in magnitudes.items() if x > format.last_held)
                for name, format in formats
            },
        }
        | values
    )


@cache
def bell(center: int, width: int = 4, entries: int = 1000) -> Statistics:
    """Return about so many entries, normal in the exponent, from center - 2 to + 2 widths."""
    exponents = range(center - 2 * width, center + 2 * width + 1)
    weights = {e: math.exp(-(((e - center) / width) ** 2)) for e in exponents}
    total = sum(weights.values())
    return counted({e: max(1, round(entries * w / total)) for e, w in weights.items()})


def layers(
    names: Iterable[str] = LAYERS, precision: str = "fp16", scale: float = 1024.0
) -> Iterator[Event]:
    """Yield the tensors of a sample in which all is well: weights, outputs, gradients."""
    shift = round(math.log2(scale))
    dtype = DTYPES[precision]
    for name in names:
        yield tensor("parameter", f"{name}.weight", bell(-6, 3))
        yield tensor("output", name, bell(0, 2), dtype)
        yield tensor("output_gradient", name, bell(shift - 16, 2), dtype)
        yield tensor("parameter_gradient", f"{name}.weight", bell(shift - 12, 3))


# --- whole runs -----------------------------------------------------------------------------------


def _run(folder: Path, *events: Event, rank: int = 0, **values: Any) -> Path:
    """Write a run of a model in fp16."""
    return write(folder, [header(rank=rank, **values), model_event(), policy(), *events], rank)


def healthy(folder: Path, num_steps: int = 60) -> Path:
    """Write a run in fp16 in which nothing is skipped and nothing lost."""
    steps = _with_samples((step(n) for n in range(1, num_steps + 1)), 10)
    return _run(folder, *steps, end(num_steps / 2 + 1, num_steps))


def _with_samples(steps: Iterable[Event], every: int, **values: Any) -> Iterator[Event]:
    for event in steps:
        yield event
        number = event["step"]
        if number == 1 or number % every == 0:
            yield sample(number, layers(**values), values.get("scale", 1024.0))


def with_skips(folder: Path, num_steps: int = 100) -> Path:
    """Write a run that skips steps 1 and 2, normal at the start, and 41, 42 and 80.

    Those three began in ``blocks.1.attn``. 12 % of the entries of the gradient of ``head.weight``
    have underflowed, and larger scales overflow.
    """
    scales = {1: 65536.0, 2: 32768.0, **dict.fromkeys(range(3, 42), 16384.0), 42: 8192.0}
    scales |= dict.fromkeys(range(43, 81), 4096.0)
    steps = [
        (skip if n in (1, 2, 41, 42, 80) else step)(n, scale=scales.get(n, 2048.0))
        for n in range(1, num_steps + 1)
    ]
    for event in steps:
        if event["taken"]:
            event["scale_after"] = event["scale"]
    head = counted({-22: 30, -10: 850}, zeros=120, flushed=120)
    events: list[Event] = []
    for event in steps:
        number, scale = event["step"], event["scale"]
        events.append(event)
        if not event["taken"]:
            events.append(culprits(number, "blocks.1.attn" if number > 2 else None))
        elif number % 10 == 0:
            rows = [*layers(LAYERS[:-1]), tensor("parameter_gradient", "head.weight", head)]
            events.append(sample(number, rows, scale))
    return _run(folder, *events, end(num_steps / 2, num_steps))


def underflowing(folder: Path, num_steps: int = 50) -> Path:
    """Write a run in float32, without a policy, that would lose in fp16.

    12 % of the gradient of ``head.weight``; with a scale from 32768 to 65536 it would be none.
    """
    head = tensor("parameter_gradient", "head.weight", counted({-39: 90, -35: 30, 0: 880}))
    events: list[Event] = []
    for number in range(1, num_steps + 1):
        events.append(step(number, scale=None, scale_after=None))
        if number % 10 == 0:
            events.append(sample(number, [*layers(LAYERS[:-1], "fp32", 1.0), head], 1.0))
    return write(folder, [header(), model_event(), *events, end(num_steps / 2, num_steps)])


def flushing(folder: Path, scales: Iterable[float] = (1024.0,) * 5) -> Path:
    """Write a run in fp16 with ten steps and a sample at each of these scales.

    12 % of the gradient of ``head.weight`` have become zero in a sample at 1024. At a larger scale
    all are there; the smallest need 4096, and a scale above 65536 would overflow.
    """
    flushed = counted({-22: 30, 10: 850}, zeros=120, flushed=120)
    events: list[Event] = []
    for number, scale in enumerate(scales, start=1):
        head = flushed
        if scale > 1024.0:
            shift = round(math.log2(scale / 1024.0))
            head = counted({shift - 26: 120, shift - 22: 30, shift + 10: 850}, flushed=0)
        row = tensor("parameter_gradient", "head.weight", head)
        rows = [*layers(LAYERS[:-1], scale=scale), row]
        first = 10 * number - 9
        events += [step(n, scale=scale, scale_after=scale) for n in range(first, first + 10)]
        events.append(sample(10 * number, rows, scale))
    last = 10 * number
    return _run(folder, *events, end(last / 2, last))


def losing_updates(folder: Path, lost: float = 0.97, dtype: str = "bfloat16") -> Path:
    """Write a run of 60 steps whose weights lose this share of their updates.

    ``blocks.1.mlp`` loses half of the rest as well.
    """
    events: list[Event] = []
    for number in range(1, 61):
        is_sampled = number % 10 == 0
        share = lost if is_sampled else None
        events.append(step(number, scale=None, scale_after=None, share_lost_updates=share))
        if is_sampled:
            rows = []
            for name in LAYERS:
                most = (1 + lost) / 2 if name == "blocks.1.mlp" else lost
                counts = {"updates": 1000, "lost_updates": round(1000 * most)}
                weight = replace(bell(-6, 3), **counts)
                rows.append(tensor("parameter", f"{name}.weight", weight, dtype))
            events.append(sample(number, rows, 1.0))
    return write(folder, [header(), model_event(), *events, end(30.0, 60)])


def norm_like(exponent: int = -30) -> Statistics:
    """Return a gradient that autocast has left in float32: tiny, and not on the grid of fp16."""
    return counted({exponent: 90, 0: 10})


def failed(folder: Path) -> Path:
    """Write a run whose loss is NaN from step 7 on and that an error ends at step 9."""
    steps = [step(n) for n in range(1, 7)]
    steps += [skip(n, reason="loss", loss=math.nan) for n in range(7, 10)]
    return _run(folder, *_with_samples(steps, 5), end(5.0, 9, "ValueError: the loss is NaN"))


def diagnosed(folder: Path) -> Path:
    """Write a run of which steps 41 and 42 went bad in one place and step 80 in another."""
    bad = (41, 42, 80)
    steps = (skip(n, reason="loss") if n in bad else step(n) for n in range(1, 101))
    log = bad_op(op="log", name="log", module="head")
    last = diagnosis(80, verdict="maths", bad=log, cure=None), end(50.0, 100)
    return _run(folder, *_with_samples(steps, 25), diagnosis(41), diagnosis(42), *last)


def killed(folder: Path) -> Path:
    """Write a run without an end whose last line is cut."""
    _run(folder, *(step(n) for n in range(1, 6)))
    with file_of(folder, 0).open("a") as file:
        file.write('{"event":"step","st')
    return folder


def bf16(folder: Path, num_steps: int = 60) -> Path:
    """Write a run in bf16, without a scaler, in which all is well."""
    steps = (step(n, scale=None, scale_after=None) for n in range(1, num_steps + 1))
    events = [header(), model_event(), policy("bfloat16")]
    events += _with_samples(steps, 10, precision="bf16", scale=1.0)
    return write(folder, [*events, end(num_steps / 2, num_steps)])


def several_ranks(folder: Path, world_size: int = 3) -> Path:
    """Write a run of several processes; the last disagrees with the others from step 20 on."""
    for rank in range(world_size):
        steps = [step(n) for n in range(1, 31)]
        if rank and rank == world_size - 1:
            steps[19] = skip(20)
        samples = _with_samples(steps, 10)
        _run(folder, *samples, end(15.0, 30), rank=rank, world_size=world_size)
    return folder


def only_header(folder: Path) -> Path:
    """Write a run that was killed before its first step."""
    return write(folder, [header()])


def hostile(folder: Path) -> Path:
    """Write a run in which every text that comes from outside is an attack on a page."""
    names = (HOSTILE, "a`b`", "![x](http://x) | [y](z)", "'\"&amp;\n# title")
    return write(
        folder,
        [
            header(command=[HOSTILE], machine=HOSTILE, device=HOSTILE, torch=HOSTILE),
            model_event(names, name=HOSTILE),
            policy(text=HOSTILE),
            *(step(n) for n in range(1, 20)),
            *(sample(n, layers(names)) for n in (1, 10)),
            skip(20, optimizer=HOSTILE),
            culprits(20, HOSTILE),
            diagnosis(
                20,
                verdict="data",
                bad=bad_op(name=HOSTILE, module=HOSTILE, line=Line(HOSTILE, 1, HOSTILE, HOSTILE)),
                tensor=HOSTILE,
                cure=Cure("data", HOSTILE),
                notes=("\n```\n# title", HOSTILE),
            ),
            diagnosis(20, cure=Cure("policy", HOSTILE)),
            note(20, HOSTILE),
            end(10.0, 20, HOSTILE),
        ],
    )


def huge(folder: Path, num_steps: int, num_layers: int = 200) -> Path:
    """Write a run in which every step is sampled, with a tensor for each layer."""
    names = [f"blocks.{n // 4}.{('attn', 'mlp', 'norm', 'proj')[n % 4]}" for n in range(num_layers)]
    pattern = [
        [
            tensor("parameter_gradient", f"{name}.weight", bell(-8 + (3 * n + shift) % 7, 2))
            for n, name in enumerate(names)
        ]
        for shift in range(7)
    ]

    def events() -> Iterator[Event]:
        yield from (header(every=1), model_event(names), policy())
        for number in range(1, num_steps + 1):
            yield skip(number) if number % 97 == 0 else step(number)
            yield sample(number, pattern[number % 7])
        yield end(num_steps / 2, num_steps)

    return write(folder, events())


WRITERS = (
    healthy,
    with_skips,
    underflowing,
    failed,
    diagnosed,
    killed,
    bf16,
    losing_updates,
    several_ranks,
    only_header,
    hostile,
)
"""A run of each kind."""


def summary_of(folder: Path) -> Summary:
    return summarize(read_run(folder))
