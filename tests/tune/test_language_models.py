"""The policies of docs/language_models.md, on tiny models of transformers with planted outliers."""

import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from benchmarks.float16_checkpoints import (
    CASES,
    NUM_STEPS,
    checkpoint,
    first_overflow,
    train,
    tuned_rules,
)

pytestmark = pytest.mark.filterwarnings("ignore::halfstep.errors.SkippedStepsWarning")

PAGE = Path(__file__).parents[2] / "docs" / "language_models.md"


@pytest.mark.parametrize("kind", ["Llama", "Gemma3Text", "T5", "Phi"])
def test_steps_are_taken_with_the_policy_and_none_without(kind: str) -> None:
    model, batch = checkpoint(kind, 2, 64)
    exact = train(model, batch, None)
    assert train(model, batch, "standard").losses == ()
    taken = train(model, batch, f"standard; {CASES[kind].rules}").losses
    assert taken == pytest.approx(exact.losses, rel=0.01)


def test_embeddings_in_float32_keep_the_stream_of_float16_weights_finite() -> None:
    model, batch = checkpoint("GptOss", 2, 64)
    base, rules = CASES["GptOss"].base, CASES["GptOss"].rules
    assert len(train(model, batch, base).losses) == NUM_STEPS  # float32 weights need nothing
    assert train(model, batch, base, torch.float16).losses == ()
    assert len(train(model, batch, f"{base}; {rules}", torch.float16).losses) == NUM_STEPS


def test_the_overflow_is_named_and_tuned_away() -> None:
    model, batch = checkpoint("Llama", 2, 64)
    assert first_overflow(model, batch, "standard").startswith("mul in model.layers.*.mlp, forward")
    assert tuned_rules(model, batch, "standard") == "@model.layers.*.mlp:fp32"


def test_the_page_has_the_rules_that_were_measured() -> None:
    rules = {case.rules for case in CASES.values() if case.rules}
    assert rules <= set(re.findall(r"`([^`]*:fp32)`", PAGE.read_text(encoding="utf-8")))
