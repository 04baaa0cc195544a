"""Faults in what a step is given: parameters, buffers, batches, masks, the scale of the loss."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from tests.diagnose import gradients, models
from tests.diagnose.gpt import CONTEXT
from tests.diagnose.models import Spot, spots_of
from tests.diagnose.reference import bad_ops
from tests.diagnose.training import CLASSES, MODELS, Setting, Training, armed, largest_scale
from tests.diagnose.truths import Case, Truth, line_of_layer, lines_of, nothing
from torch import Tensor, nn


def _layers(model: nn.Module) -> list[str]:
    """Return the paths of products whose overflow nothing hides: gates do."""
    return [
        path
        for path, module in model.named_modules()
        if type(module) in (nn.Linear, nn.Conv2d)
        and "cell" not in path
        and not (isinstance(model, models.Recurrent) and path == "stem")
    ]


def _first(model: nn.Module) -> str:
    """Return the path of the product that the batch goes into."""
    return next(p for p, m in model.named_modules() if type(m) in (nn.Linear, nn.Conv2d))


def _op_of(model: nn.Module, path: str) -> str:
    if isinstance(model, models.LSTM) and path == "mix":
        return "add"  # what nn.LSTM returns is not contiguous: a product, then the bias
    return "addmm" if isinstance(model.get_submodule(path), nn.Linear) else "convolution"


# --- faults in the parameters ---------------------------------------------------------------------


def large_weight(rng: random.Random, setting: Setting) -> Case:
    """A product overflows: its weight is large, and so is its bias."""
    model = armed(setting).model
    path = rng.choice(_layers(model))

    def arm(training: Training) -> None:
        layer = training.model.get_submodule(path)
        sizes = []
        handle = layer.register_forward_hook(lambda m, i, out: sizes.append(out.abs().amax()))
        training.step()
        handle.remove()
        training.optimizer.zero_grad()
        with torch.no_grad():
            factor = min(5e4 / float(sizes[0]), 6e4 / float(layer.weight.abs().amax()))
            layer.weight.mul_(factor)
            layer.bias.fill_(6e4)

    setting = replace(setting, takes=False, clips=False)
    is_conv = isinstance(model.get_submodule(path), nn.Conv2d)  # a CPU casts results of some sizes
    ops = frozenset({_op_of(model, path), *["_to_copy"][:is_conv]})
    truth = Truth("range", ops, path, lines=line_of_layer(model, path))
    return Case("large weight", setting, arm, truth)


def weight_past_the_range(rng: random.Random, setting: Setting) -> Case:
    """A weight does not fit in float16: its cast overflows."""
    model = armed(setting).model
    path = rng.choice(_layers(model))

    def arm(training: Training) -> None:
        with torch.no_grad():
            training.model.get_submodule(path).weight.view(-1)[:] = 1e5

    op = frozenset({"_to_copy"})
    truth = Truth("range", op, path, lines=line_of_layer(model, path))
    return Case("weight past the range", setting, arm, truth)


def large_embedding(rng: random.Random, setting: Setting) -> Case:
    def arm(training: Training) -> None:
        with torch.no_grad():
            training.model.embed.weight.mul_(1e6)

    lines = line_of_layer(armed(setting).model, "wide")
    truth = Truth("range", frozenset({"_to_copy"}), "wide", lines=lines)
    return Case("large embedding", setting, arm, truth)


def attention_logits(rng: random.Random, setting: Setting) -> Case:
    """q and k grow, and the product of the two overflows."""
    path = f"layers.{rng.randrange(setting.depth)}.attention"

    def arm(training: Training) -> None:
        attention = training.model.get_submodule(path)
        with torch.no_grad():
            for layer in (attention.q, attention.k):
                layer.weight.mul_(1500)

    truth = Truth("range", frozenset({"bmm"}), path, lines=lines_of("Attention.scores"))
    return Case("attention logits", setting, arm, truth)


def residual(rng: random.Random, setting: Setting) -> Case:
    """The stream grows from block to block; each branch is in range, the sum is not."""
    at = rng.randrange(setting.depth)
    is_gpt = setting.model in ("gpt", "gpt fused")
    block = f"layers.{at}.mlp" if is_gpt else f"blocks.{at}"
    share = 7.5e4 / (at + 2)  # past the range with this block, not before

    def arm(training: Training) -> None:
        model = training.model
        with torch.no_grad():
            for i in range(at + 1):
                part = model.layers[i].mlp if is_gpt else model.blocks[i]
                part.down.bias[0] = share
            (model.wide if is_gpt else model.stem).bias[0] = share

    in_place = setting.model == "mlp in place"
    truth = Truth(
        "range",
        frozenset({"add_" if in_place else "add"}),
        block,
        lines=lines_of("InPlaceBlock.add" if in_place else "Block.add"),
    )
    return Case("residual", setting, arm, truth)


def bad_parameter(rng: random.Random, setting: Setting) -> Case:
    model = armed(setting).model
    named = dict(model.named_parameters())
    name = rng.choice(sorted(named))
    at = rng.randrange(named[name].numel())
    value = math.inf if name.startswith("head.") and rng.random() < 0.5 else math.nan

    def arm(training: Training) -> None:
        with torch.no_grad():
            weight = dict(training.model.named_parameters())[name]
            if name == "embed.weight":
                weight[training.batches[-1][0][0, 0], 0] = value
            else:
                weight.view(-1)[at] = value

    truth = Truth("data", frozenset(), None, tensor=rf"(?<![\w.]){re.escape(name)}(?![\w.])")
    setting = replace(setting, dtype=rng.choice((torch.float16, torch.bfloat16)))
    return Case("bad parameter", setting, arm, truth)


def bad_buffer(rng: random.Random, setting: Setting) -> Case:
    stage = rng.randrange(setting.depth)
    name = "positions" if setting.model != "cnn" else f"stages.{stage}.norm.running_mean"
    value = rng.choice((math.nan, math.inf))

    def arm(training: Training) -> None:
        dict(training.model.named_buffers())[name].view(-1)[0] = value
        for module in training.model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()  # frozen: its buffers are read

    truth = Truth("data", frozenset(), None, tensor=rf"(?<![\w.]){re.escape(name)}(?![\w.])")
    return Case("bad buffer", setting, arm, truth)


# --- faults in the batch --------------------------------------------------------------------------


def bad_batch(rng: random.Random, setting: Setting) -> Case:
    value, which = rng.choice((math.nan, math.inf)), rng.randrange(setting.micro_batches)

    def arm(training: Training) -> None:
        training.batches[which][0].view(-1)[rng_at] = value

    rng_at = rng.randrange(20)
    return Case("bad batch", setting, arm, Truth("data", frozenset(), None, tensor=r"\bx\b"))


def bad_target(rng: random.Random, setting: Setting) -> Case:
    """A tensor of the loss, that no module is given."""

    def arm(training: Training) -> None:
        training.batches[-1][1].view(-1)[3] = math.nan

    named = r"^(?!.*(weight|bias|argument x))"
    return Case("bad target", setting, arm, Truth("data", frozenset(), None, tensor=named))


def large_batch(rng: random.Random, setting: Setting) -> Case:
    def arm(training: Training) -> None:
        training.batches[-1][0].mul_(1e6)

    model = armed(setting).model
    path = _first(model)
    truth = Truth("range", frozenset({"_to_copy"}), path, lines=line_of_layer(model, path))
    return Case("large batch", setting, arm, truth)


# --- masks ----------------------------------------------------------------------------------------


def padding_only(rng: random.Random, setting: Setting) -> Case:
    """One sequence is all padding: no logit is left in its rows."""
    path = f"layers.{rng.randrange(setting.depth)}.attention"
    dtype = rng.choice((torch.float16, torch.bfloat16))

    def arm(training: Training) -> None:
        padding = torch.zeros(setting.batch, CONTEXT, dtype=torch.bool)
        padding[1] = True
        training.model.get_submodule(path).padding = padding

    lines = lines_of("Attention.softmax")
    truth = Truth("maths", frozenset({"_softmax"}), path, lines=lines)
    return Case("padding only", replace(setting, dtype=dtype), arm, truth)


def mask_times_inf(rng: random.Random, setting: Setting) -> Case:
    """False * -inf is NaN."""
    path = f"layers.{rng.randrange(setting.depth)}.attention"

    def arm(training: Training) -> None:
        training.model.get_submodule(path).mask = "times"

    truth = Truth("maths", frozenset({"mul"}), path, lines=lines_of("Attention.times"))
    return Case("mask times inf", setting, arm, truth)


# --- the scale of the loss ------------------------------------------------------------------------


def steep(rng: random.Random, setting: Setting) -> Case:
    """The gradient overflows at one place first, and only because the loss is scaled."""
    setting = replace(setting, scale=1.0, takes=True)
    places = list(spots_of(armed(setting).model))
    for at in rng.sample(range(len(places)), len(places)):
        scale = largest_scale(setting, partial(_put_steep, at, 1.0)) / 4
        scaled = replace(setting, scale=scale)
        gradient = _gradient_at(armed(scaled, partial(_put_steep, at, 1.0)), at)
        arm = partial(_put_steep, at, min(4 * 65504 / gradient, 3e4))
        ops, module, lines = frozenset({"mul"}), places[at][0], lines_of("steep")
        if not armed(setting, arm).is_finite():
            continue  # a recurrent place: it grows from step to step
        first = bad_ops(armed(scaled, arm))[:1]
        if [(event.op, event.module, event.line in lines) for event in first] == [
            ("mul", module, True)
        ]:
            truth = Truth("scale", ops, module, "backward", "mul", lines)
            return Case("steep", scaled, arm, truth)
    raise AssertionError(f"nowhere in {setting} is the gradient the largest")


def _put_steep(at: int, factor: float, training: Training) -> None:
    [place for _, place in spots_of(training.model)][at].code = gradients.steep(factor)


def _gradient_at(training: Training, at: int) -> float:
    """Return the amax of the gradient of what the code at a place returns."""
    place: Spot | models.Place = [place for _, place in spots_of(training.model)][at]
    code, seen = place.code, [0.0]
    assert code is not None

    def watched(x: Tensor) -> Tensor:
        y = code(x)
        if y.requires_grad:  # not in the first of two runs of a checkpoint
            y.register_hook(lambda g: seen.append(float(g.abs().amax())))
        return y

    place.code = watched
    training.step()
    return max(seen)


def large_scale(rng: random.Random, setting: Setting) -> Case:
    """The scale of the loss is too large; the reference says where that shows first."""
    setting = replace(setting, scale=1.0, takes=True)
    setting = replace(setting, scale=largest_scale(setting, nothing) * 2)
    first = bad_ops(armed(setting))[0]
    assert first.line
    lines = frozenset({first.line})
    truth = Truth("scale", frozenset({first.op}), first.module, "backward", lines=lines)
    return Case("large scale", setting, nothing, truth)


FLOATS = frozenset(MODELS) - {"gpt", "gpt fused"}
STATES: dict[str, tuple[Callable[[random.Random, Setting], Case], frozenset[str]]] = {
    "large weight": (large_weight, frozenset(MODELS)),
    "weight past the range": (weight_past_the_range, frozenset(MODELS)),
    "large embedding": (large_embedding, frozenset({"gpt", "gpt fused"})),
    "attention logits": (attention_logits, frozenset({"gpt"})),
    "residual": (residual, frozenset({"mlp", "mlp in place", "gpt", "gpt fused"})),
    "bad parameter": (bad_parameter, frozenset(MODELS)),
    "bad buffer": (bad_buffer, frozenset({"cnn", "gpt", "gpt fused"})),
    "bad batch": (bad_batch, FLOATS),
    "bad target": (bad_target, FLOATS - CLASSES - {"autoencoder"}),
    "large batch": (large_batch, FLOATS),
    "padding only": (padding_only, frozenset({"gpt"})),
    "mask times inf": (mask_times_inf, frozenset({"gpt"})),
    "steep": (steep, frozenset(MODELS)),
    "large scale": (large_scale, frozenset(MODELS)),
}
