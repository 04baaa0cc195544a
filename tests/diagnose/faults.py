"""The cases: a model, a fault at a random place, and the expected diagnosis.

for case in cases(seed=0):
    training = case.make()      # with the fault in it; case.make(fault=False) without
    halfstep.diagnose(training.step, model=training.model)
"""

from __future__ import annotations

import math
import random
import zlib
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import chain

import torch
from tests.diagnose import gradients  # noqa: F401  (it fills INJECTIONS, too)
from tests.diagnose.corpus.code import overflowing, undefined  # noqa: F401  (they fill INJECTIONS)
from tests.diagnose.corpus.code.harmless import DECOYS
from tests.diagnose.gpt import CONTEXT, GPT, MASKS, Attention
from tests.diagnose.injections import INJECTIONS
from tests.diagnose.losses import LOSSES
from tests.diagnose.models import spots_of
from tests.diagnose.states import STATES
from tests.diagnose.training import CLASSES, MODELS, Setting, Training, armed
from tests.diagnose.truths import Case, Truth, lines_of, nothing

FAULTS = (*STATES, *LOSSES, *INJECTIONS)


def cases(seed: int = 0) -> Iterator[Case]:
    """Yield the cases of a seed: every fault in models that can have it, at random places."""
    return chain.from_iterable(cases_of(fault, seed) for fault in FAULTS)


def cases_of(fault: str, seed: int = 0) -> Iterator[Case]:
    """Yield those of one fault."""
    rng = random.Random(zlib.crc32(f"{seed} {fault}".encode()))
    number, possible = 4, frozenset(MODELS)
    if fault in STATES:
        make_case, possible = STATES[fault]
        number = max(4, min(8, 2 * len(possible)))
    elif fault in LOSSES:
        make_case = partial(lose, fault)
        possible = frozenset(CLASSES) if LOSSES[fault].classes else possible
    else:
        make_case = partial(inject, fault)
    kinds = sorted(possible)
    rng.shuffle(kinds)
    for i in range(number):
        case = make_case(rng, _setting(kinds[i % len(kinds)], rng))
        yield replace(case, warm=not case.setting.takes and rng.random() < 0.4)


def _setting(model: str, rng: random.Random) -> Setting:
    """Return a random training that is finite without a fault."""
    scaled, takes = rng.random() < 0.7, rng.random() < 0.5
    return Setting(
        model=model,
        seed=rng.randrange(2**20),
        width=rng.choice((16, 32)),
        depth=rng.choice((2, 3)),
        batch=rng.choice((4, 6)),
        again=rng.choice(("no", "no", "no", "yes", "reentrant")),
        micro_batches=rng.choice((1, 1, 2, 3)),
        scale=2.0 ** rng.randrange(4, 11) if scaled else None,
        takes=takes,
        clips=takes and rng.random() < 0.4,
        mask=rng.choice(MASKS),
    )


# --- faults in code -------------------------------------------------------------------------------


def inject(name: str, rng: random.Random, setting: Setting) -> Case:
    """Code of :mod:`injections` at a random place, and a decoy before it now and then."""
    injection = INJECTIONS[name]
    if injection.verdict == "maths" and rng.random() < 0.3:
        setting = replace(setting, dtype=torch.bfloat16)
    if rng.random() < 0.2 and name != "write_rows":  # which PyTorch's autocast refuses
        setting = replace(setting, plain=True)
    places = list(spots_of(armed(setting).model))
    at = rng.randrange(len(places))
    decoy = rng.choice(DECOYS) if at and rng.random() < 0.4 else None
    decoy_at = rng.randrange(at) if decoy else 0

    def arm(training: Training) -> None:
        here = [place for _, place in spots_of(training.model)]
        here[at].code = injection.code
        if decoy:
            here[decoy_at].code = decoy

    path = places[at][0]
    truth = Truth(
        verdict=injection.verdict,
        ops=injection.ops,
        module=path,
        phase=injection.phase,
        forward_op=injection.forward_op,
        lines=lines_of(name),
        by_hand=injection.by_hand,
    )
    return Case(name, setting, arm, truth, decoy=decoy.__name__ if decoy else None)


def lose(name: str, rng: random.Random, setting: Setting) -> Case:
    """A loss that goes wrong."""
    loss = LOSSES[name]
    setting = replace(setting, loss=loss.loss, outside=loss.outside)
    return Case(name, setting, nothing, Truth(loss.verdict, loss.ops, "", lines=lines_of(name)))


# --- no fault -------------------------------------------------------------------------------------


def clean_cases(seed: int = 0) -> Iterator[Training]:
    """Yield 200 trainings whose step is finite, some with infinities that do no harm."""
    rng = random.Random(seed)
    for i in range(200):
        setting = _setting(sorted(MODELS)[i % len(MODELS)], rng)
        if rng.random() < 0.3:
            setting = replace(setting, dtype=torch.bfloat16)
        yield armed(setting, partial(_harmless, rng.randrange(2**20)))


def _harmless(seed: int, training: Training) -> None:
    rng = random.Random(seed)
    for _, place in spots_of(training.model):
        if rng.random() < 0.2:
            place.code = rng.choice(DECOYS)
    for module in training.model.modules():
        if isinstance(module, Attention):
            module.mask = rng.choice(MASKS)
            module.padding = torch.zeros(training.setting.batch, CONTEXT, dtype=torch.bool)
            module.padding[0, 4:] = True
    if isinstance(training.model, GPT) and rng.random() < 0.3:
        used = torch.cat([x.flatten() for x, _ in training.batches]).unique()
        unused = sorted(set(range(20)) - set(used.tolist()))
        with torch.no_grad():
            training.model.embed.weight[unused] = math.nan
