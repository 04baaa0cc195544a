"""Architectures of transformers: all that can be built tiny, one training step of each.

Three questions for each: are outputs and gradients those of ``torch.autocast``, bit for bit, under
``policy="torch"``? Does a step run under the default policy? And if the weights of a linear layer
overflow float16, does ``halfstep.diagnose`` name the layer, and a cure that makes the step finite?

    python benchmarks/architectures.py                  # a quarter of an hour
    python benchmarks/architectures.py --only bert gpt2
"""

import argparse
import os
import random
import signal
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
import numpy as np
import torch
import transformers
from torch import Tensor, nn

import halfstep

PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}
MOST_PARAMETERS, MOST_SECONDS = 5_000_000, 30
TINY: dict[str, Any] = (
    dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "embedding_size"), 32)
    | dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers"), 2)
    | dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers"), 2)
    | dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4)
    | dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4)
    | dict.fromkeys(("intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim"), 64)
    | dict.fromkeys(("d_ff", "n_inner", "hidden_dim"), 64)
    | dict.fromkeys(("head_dim", "d_kv", "v_head_dim", "state_size", "patch_size"), 8)
    | dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4)
    | dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim"), 4)
    | dict.fromkeys(("kv_lora_rank", "q_lora_rank", "num_mel_bins"), 16)
    | dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "image_size"), 32)
    | dict.fromkeys(("num_key_value_heads", "num_experts_per_tok"), 2)
    | dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "bos_token_id"), 1)
    | {"vocab_size": 128, "max_position_embeddings": 64, "n_positions": 64}
    | {"pad_token_id": 0, "eos_token_id": 2}
)


class TooSlowError(BaseException):
    """The time for an architecture is over; nothing that is tried catches it."""


def _stop(*_: object) -> None:
    raise TooSlowError


class Step(NamedTuple):
    """What a step has made."""

    outputs: list[Tensor]
    gradients: dict[str, Tensor]


def model_of(kind: str) -> nn.Module | None:
    """Return a tiny model of a kind, None if none can be built."""
    config_class = transformers.CONFIG_MAPPING[kind]
    for kept in ((), ("head_dim",), ("image_size", "patch_size"), ("num_key_value_heads",)):
        try:
            default = config_class()
            sizes = {
                name: size
                for name, size in TINY.items()
                if isinstance(getattr(default, name, None), int) and name not in kept
            }
            config = config_class(**sizes)
            for auto in (transformers.AutoModelForCausalLM, transformers.AutoModel):
                if type(config) in auto._model_mapping:
                    with torch.device("meta"):
                        num = sum(p.numel() for p in auto.from_config(config).parameters())
                    return auto.from_config(config) if num <= MOST_PARAMETERS else None
        except Exception:  # sizes that do not fit each other
            continue
    return None


def batches(model: Any) -> Iterator[dict[str, Tensor]]:
    """Yield batches of which the model may take one."""
    side = getattr(model.config, "image_size", 32)
    channels = getattr(model.config, "num_channels", 3)
    ids = torch.randint(3, 100, (2, 12))
    if model.main_input_name == "pixel_values" and isinstance(side, int):
        yield {"pixel_values": torch.randn(2, channels, side, side)}
    yield {"input_ids": ids}
    yield {"input_ids": ids, "decoder_input_ids": ids}
    yield {"pixel_values": torch.randn(2, 3, 64, 64)}
    yield {"input_values": torch.randn(2, 4000)}
    yield {"input_features": torch.randn(2, 16, 128), "decoder_input_ids": ids}


def results(value: Any) -> list[Tensor]:
    """Return all tensors of an output that have a gradient."""
    if isinstance(value, Tensor):
        return [value] if value.requires_grad and value.is_floating_point() else []
    parts = value.values() if isinstance(value, dict) else value
    is_nested = isinstance(value, dict | list | tuple)
    return [tensor for part in parts for tensor in results(part)] if is_nested else []


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
    torch.manual_seed(1)
    np.random.seed(1)  # some mask their inputs by it
    outputs = results(model(**batch))
    return torch.stack([each.float().square().mean() for each in outputs]).sum(), outputs


def step(model: nn.Module, batch: dict[str, Tensor], around: AbstractContextManager[Any]) -> Step:
    model.zero_grad()
    with around:
        loss, outputs = loss_of(model, batch)
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return Step([each.detach() for each in outputs], gradients)


def are_same(first: Step, second: Step) -> bool:
    """Return whether two steps are equal bit for bit, NaN included."""
    if first.gradients.keys() != second.gradients.keys():
        return False
    gradients = [(each, second.gradients[name]) for name, each in first.gradients.items()]
    return all(
        a.dtype == b.dtype and torch.equal(a.nan_to_num(), b.nan_to_num())
        for a, b in [*zip(first.outputs, second.outputs, strict=True), *gradients]
    )


def planted(model: nn.Module, batch: dict[str, Tensor]) -> str | None:
    """Let a linear layer overflow; return None if it did not, else what became of the diagnosis."""
    layers = {name: m for name, m in model.named_modules() if type(m) is nn.Linear and name}
    name = random.choice(sorted(layers)) if layers else None
    if name is None:
        return None
    weight = layers[name].weight
    before = weight.detach().clone()
    with torch.no_grad():
        weight.mul_(6e4 / weight.abs().max())

    def run(policy: str = "standard", dtype: torch.dtype = torch.float16) -> Tensor:
        model.zero_grad()
        with halfstep.autocast("cpu", dtype, policy=policy, module=model):
            loss, _ = loss_of(model, batch)
        loss.backward()
        return loss

    try:
        if run().isfinite():
            return None
        found = halfstep.diagnose(run, model=model)
        if found.bad is None or found.bad.module != name:
            return f"missed {name}: {found}"
        cure = found.cure
        if cure is None or not (cure.policy or cure.dtype):
            return f"no cure: {found}"
        dtype = torch.float16 if cure.dtype is None else getattr(torch, cure.dtype)
        is_cured = run(cure.policy or "standard", dtype).isfinite()
        return "cured" if is_cured else f"no cure: {found}"
    finally:
        with torch.no_grad():
            weight.copy_(before)
        model.zero_grad()


def tried(model: nn.Module) -> dict[str, Tensor] | None:
    """Return a batch that the model takes in both precisions, None if there is none."""
    for batch in batches(model):
        try:
            for dtype in PRECISIONS.values():
                step(model, batch, torch.autocast("cpu", dtype))
        except Exception:
            continue
        return batch
    return None


def report(kind: str, model: nn.Module, batch: dict[str, Tensor]) -> Counter[str]:
    """Return counts of what became of one architecture; print what is not as it should be."""
    counts = Counter(architectures=1)
    for name, dtype in PRECISIONS.items():
        theirs = step(model, batch, torch.autocast("cpu", dtype))
        ours = step(model, batch, halfstep.autocast("cpu", dtype, policy="torch"))
        if are_same(theirs, ours):
            counts[f"bit-equal in {name}"] += 1
        else:
            print(f"{kind}: another step in {name} than torch.autocast's", flush=True)
    try:
        step(model, batch, halfstep.autocast("cpu", torch.bfloat16))
        counts["run under the default policy"] += 1
    except RuntimeError as error:
        print(f"{kind}: {error}", flush=True)
        return counts
    became = planted(model, batch)
    if became is not None:
        counts["overflows"] += 1
        counts["overflows named"] += not became.startswith("missed")
        counts["overflows cured"] += became == "cured"
        if became != "cured":
            print(f"{kind}: {became}", flush=True)
    return counts


def main() -> None:
    """Try all architectures, or some."""
    parser = argparse.ArgumentParser(description=__doc__)
    kinds = sorted(transformers.CONFIG_MAPPING)
    parser.add_argument("--only", nargs="+", metavar="KIND", default=kinds, choices=kinds)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    random.seed(0)
    signal.signal(signal.SIGALRM, _stop)
    counts: Counter[str] = Counter()
    for kind in parser.parse_args().only:
        print(f"\r{kind:40}", end="", file=sys.stderr)
        torch.manual_seed(0)
        signal.alarm(MOST_SECONDS)
        try:
            model = model_of(kind)
            batch = None if model is None else tried(model)
            if model is not None and batch is not None:
                counts += report(kind, model, batch)
        except TooSlowError:
            counts["left out, too slow"] += 1
        finally:
            signal.alarm(0)
    print(f"\ntransformers {transformers.__version__}, PyTorch {torch.__version__}")
    for what, count in counts.items():
        print(f"{count:5}  {what}")


if __name__ == "__main__":
    main()
