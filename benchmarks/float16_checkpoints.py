"""Bfloat16 checkpoints in float16: tiny models of transformers with the outliers of real ones.

Each model is built from its configuration, with random weights. Some weights are then chosen so
that the first token of each sequence reaches what real checkpoints are known to reach, and all are
rounded to bfloat16. Which op overflows in float16? What does ``halfstep.tune`` keep in float32?
Is that the same for models of other sizes? Are training steps with it close to float32?

    python benchmarks/float16_checkpoints.py                    # five minutes
    python benchmarks/float16_checkpoints.py --only llama t5
"""

import argparse
import copy
import os
import re
import warnings
from collections.abc import Callable, Mapping
from inspect import signature
from types import MappingProxyType
from typing import Any, NamedTuple

os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
import torch
import transformers
from torch import Tensor, nn

import halfstep

SIZES = ((2, 64), (4, 64), (3, 128))  # layers, width
NUM_STEPS, MOST_SKIPPED = 4, 12
Batch = dict[str, Tensor]


class Case(NamedTuple):
    """An architecture, its outlier and the rules that published policies add for it."""

    model: str
    plant: Callable[[Any, Batch], None]
    rules: str
    source: str
    options: Mapping[str, Any] = MappingProxyType({})
    base: str = "standard"


# --- outliers -------------------------------------------------------------------------------------


def inputs_of(model: nn.Module, batch: Batch, module: nn.Module) -> Tensor:
    """Return the first input of a module in float32, a row for each token."""
    seen: list[Tensor] = []
    hook = module.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach()))
    model(**batch)
    hook.remove()
    return seen[0].flatten(0, -2)


def firing(inputs: Tensor, batch: Batch, value: float, others: float = 0) -> Tensor:
    """Return weights that give a value for the first token of each sequence, and for others."""
    wanted = torch.full(batch["input_ids"].shape, float(others))
    wanted[:, 0] = value
    return torch.linalg.pinv(inputs, rtol=1e-3) @ wanted.flatten()


def gating(inputs: Tensor, batch: Batch, value: float) -> Tensor:
    """Return weights that give ``value`` for the first tokens, and for others what gates close."""
    return firing(inputs, batch, value, -value / 4)


def middle(layers: Any) -> Any:
    return layers[len(layers) // 2]


def in_gated(mlp: Any, model: Any, batch: Batch, gate: float, up: float, out: float) -> None:
    """Let a gated feed-forward compute ``gate`` times ``up``, and return ``out``."""
    inputs = inputs_of(model, batch, mlp)
    mlp.gate_proj.weight[0] = gating(inputs, batch, gate)
    mlp.up_proj.weight[0] = firing(inputs, batch, up)
    mlp.down_proj.weight[:, 0] = 0
    mlp.down_proj.weight[3, 0] = out / (gate * up)


def in_scores(attention: Any, value: float) -> None:
    """Let each product of a query and a key begin with ``value`` squared."""
    last = slice(attention.head_dim - 1, None, attention.head_dim)
    for projection in (attention.q_proj, attention.k_proj):
        projection.weight[last] = 0
        projection.bias[last] = value


def llama(model: Any, batch: Batch) -> None:
    in_gated(middle(model.model.layers).mlp, model, batch, 255.9, 261.8, 2600)


def gemma3(model: Any, batch: Batch) -> None:
    layer = middle(model.model.layers)
    in_gated(layer.mlp, model, batch, 10, 10, 100)
    norm = layer.post_feedforward_layernorm
    # A third of what is published: the norm of a narrow model returns less for the same weight.
    norm.weight[3] = 200_000 / len(norm.weight) ** 0.5 - 1


def gemma4(model: Any, batch: Batch) -> None:
    in_gated(middle(model.model.layers).mlp, model, batch, 300, 300, 100)


def qwen2_moe(model: Any, batch: Batch) -> None:
    in_gated(middle(model.model.layers).mlp.shared_expert, model, batch, 100, 100, 1.4 * 50_000)


def scores(model: Any, batch: Batch) -> None:
    in_scores(middle(model.model.layers).self_attn, 320)


def t5(model: Any, batch: Batch) -> None:
    dense = middle(model.encoder.block).layer[1].DenseReluDense
    dense.wi.weight[0] = gating(inputs_of(model, batch, dense.wi), batch, 500)
    dense.wo.weight[:, 0] = 0
    dense.wo.weight[3, 0] = 66_246.4 / 500


def in_experts(layer: Any, model: Any, batch: Batch, out: float) -> None:
    """Let all experts of GPT-OSS return ``out``; their gate ends at (7 + 1) * 7."""
    experts = layer.mlp.experts
    inputs = inputs_of(model, batch, experts)
    experts.gate_up_proj[:, :, 0] = gating(inputs, batch, 50)
    experts.gate_up_proj[:, :, 1] = firing(inputs, batch, 50)
    experts.down_proj[:, 0] = 0
    experts.down_proj[:, 0, 3] = out / 56


def gpt_oss(model: Any, batch: Batch) -> None:
    in_experts(model.model.layers[0], model, batch, 58_820)
    in_experts(model.model.layers[-1], model, batch, 33_760)


def gpt_oss_expert(model: Any, batch: Batch) -> None:
    in_experts(middle(model.model.layers), model, batch, 80_000)


def qwen3_moe(model: Any, batch: Batch) -> None:
    experts = middle(model.model.layers).mlp.experts
    inputs, size = inputs_of(model, batch, experts), experts.down_proj.shape[-1]
    experts.gate_up_proj[:, 0] = gating(inputs, batch, 10)
    experts.gate_up_proj[:, size] = firing(inputs, batch, 10)
    experts.down_proj[:, :, 0] = 0
    experts.down_proj[:, 3, 0] = 350 / 100


def modernbert(model: Any, batch: Batch) -> None:
    mlp = middle(model.model.layers).mlp
    inputs = inputs_of(model, batch, mlp)
    mlp.Wi.weight[0] = gating(inputs, batch, 255.9)
    mlp.Wi.weight[mlp.Wo.in_features] = firing(inputs, batch, 261.8)
    mlp.Wo.weight[:, 0] = 0
    mlp.Wo.weight[3, 0] = 2600 / (255.9 * 261.8)


EAGER = {"attn_implementation": "eager"}
T5 = {"decoder_start_token_id": 0, "dropout_rate": 0.0}
LOWERED = "standard; _grouped_mm:lower"  # autocast leaves the matmul of experts in float32
CASES = {
    "Llama": Case("LlamaForCausalLM", llama, "@*.mlp:fp32", "transformers#27179"),
    "Gemma3Text": Case(
        "Gemma3ForCausalLM",
        gemma3,
        "@*.post_feedforward_layernorm:fp32",
        "arXiv:2605.15572, cactus#503",
    ),
    "Gemma4Text": Case("Gemma4ForCausalLM", gemma4, "@*.mlp:fp32", "unsloth-zoo#600"),
    "Qwen2": Case("Qwen2ForCausalLM", scores, "matmul@*.self_attn:fp32", "Qwen3#910", EAGER),
    "Qwen2Moe": Case(
        "Qwen2MoeForCausalLM",
        qwen2_moe,
        "@*.shared_expert.down_proj:fp32",
        "auto-round#218",
        base=LOWERED,
    ),
    "Phi": Case("PhiForCausalLM", scores, "matmul@*.self_attn:fp32", "transformers#28163", EAGER),
    "T5": Case("T5ForConditionalGeneration", t5, "@*.wo:fp32", "transformers#5651", T5),
    "Qwen3Moe": Case("Qwen3MoeForCausalLM", qwen3_moe, "", "unsloth-zoo#866", base=LOWERED),
    "GptOss": Case(
        "GptOssForCausalLM", gpt_oss, "@*.embed_tokens:fp32", "hip-ep#168", base=LOWERED
    ),
    "GptOss, an expert": Case(
        "GptOssForCausalLM", gpt_oss_expert, "@*.experts:fp32", "hip-ep#672", base=LOWERED
    ),
    "ModernBert": Case("ModernBertForMaskedLM", modernbert, "@*.mlp:fp32", "none is known"),
}


# --- models ---------------------------------------------------------------------------------------


def sizes(layers: int, width: int) -> dict[str, Any]:
    """Return sizes by all of their names in configurations."""
    names = (
        ("hidden_size d_model moe_intermediate_size", width),
        ("intermediate_size d_ff shared_expert_intermediate_size", 2 * width),
        ("head_dim global_head_dim d_kv hidden_size_per_layer_input", width // 4),
        ("num_hidden_layers num_layers num_decoder_layers", layers),
        ("vocab_size vocab_size_per_layer_input", 128),
        ("max_position_embeddings", 64),
        ("num_attention_heads num_heads num_experts num_local_experts", 4),
        ("num_key_value_heads num_experts_per_tok eos_token_id sep_token_id", 2),
        ("decoder_sparse_step bos_token_id cls_token_id", 1),
        ("pad_token_id num_kv_shared_layers", 0),
    )
    return {name: size for text, size in names for name in text.split()}


def batch_of(num: int) -> Batch:
    ids = torch.randint(3, 128, (num, 8))
    ids[:, 0] = 1
    return {"input_ids": ids, "labels": torch.randint(3, 128, (num, 8))}


def checkpoint(kind: str, layers: int, width: int) -> tuple[nn.Module, Batch]:
    """Return a model with bfloat16 values in float32 weights, and a batch."""
    torch.manual_seed(0)
    case, config_class = CASES[kind], getattr(transformers, f"{kind.partition(',')[0]}Config")
    names = signature(config_class).parameters
    known = {name: size for name, size in sizes(layers, width).items() if name in names}
    config = config_class(**known, **case.options)
    model, batch = getattr(transformers, case.model)(config), batch_of(4)
    with torch.no_grad():
        case.plant(model, batch)
    return model.bfloat16().float(), batch


# --- questions ------------------------------------------------------------------------------------


class Steps(NamedTuple):
    """What became of some training steps."""

    losses: tuple[float, ...]  # of the steps that were taken
    num_skipped: int

    def beside(self, exact: "Steps") -> str:
        """Return how far the losses are from float32, and how many steps searched for a scale."""
        if len(self.losses) < NUM_STEPS:
            return f"{len(self.losses)} steps taken"
        pairs = zip(self.losses, exact.losses, strict=True)
        return f"{max(abs(a / b - 1) for a, b in pairs):.1%}, {self.num_skipped} skipped"


def train(
    model: nn.Module, batch: Batch, policy: str | None, weights: torch.dtype = torch.float32
) -> Steps:
    """Take steps in float16 under a policy, in float32 without one."""
    model = copy.deepcopy(model).to(weights)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    if weights != torch.float32:
        halfstep.master_weights(optimizer, store="float32")
    scaler = halfstep.GradScaler("cpu", enabled=policy is not None)
    losses: list[float] = []
    num_skipped = 0
    while len(losses) < NUM_STEPS and num_skipped < MOST_SKIPPED:
        optimizer.zero_grad()
        with halfstep.autocast(
            "cpu", torch.float16, policy=policy, module=model, enabled=policy is not None
        ):
            loss = model(**batch).loss
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        if scaler.outcome(optimizer).skipped:
            num_skipped += 1
        else:
            losses.append(loss.item())
        scaler.update()
    return Steps(tuple(losses), num_skipped)


def first_overflow(model: nn.Module, batch: Batch, policy: str) -> str:
    """Return the op and module where ``halfstep.diagnose`` finds the first non-finite value."""

    def step() -> Tensor:
        model.zero_grad()
        with halfstep.autocast("cpu", torch.float16, policy=policy, module=model):
            loss: Tensor = model(**batch).loss
        loss.backward()
        return loss

    bad = halfstep.diagnose(step, model=model).bad
    model.zero_grad()
    if bad is None:
        return "none"
    needs = "" if bad.needs is None else f", {bad.needs:,.0f}"
    return f"{bad.name} in {in_all_layers(bad.module)}, {bad.phase}{needs}"


def in_all_layers(text: str) -> str:
    return re.sub(r"\.\d+", ".*", text)


def tuned_rules(model: nn.Module, batch: Batch, base: str) -> str:
    """Return the rules that ``halfstep.tune`` adds, for all layers in place of some."""
    halves = [
        {name: each[part] for name, each in batch.items()} for part in (slice(2), slice(2, 4))
    ]
    tuned = halfstep.tune(model, halves, None, policy=base)
    rules = str(tuned.policy).removeprefix(base).removeprefix("; ").split("; ")
    text = "; ".join(dict.fromkeys(map(in_all_layers, rules))) or "nothing"
    return text if tuned.is_met else f"{text} (not met)"


def answers(kind: str, layers: int, width: int) -> dict[str, str]:
    """Return what became of an architecture of one size, by question."""
    case = CASES[kind]
    policy = f"{case.base}; {case.rules}".removesuffix("; ")
    model, batch = checkpoint(kind, layers, width)
    exact, half = train(model, batch, None), torch.float16
    embedding = f"{policy}; @{name_of_embedding(model)}:fp32"
    return {
        "first overflow": first_overflow(model, batch, case.base),
        "tune adds": tuned_rules(model, batch, case.base),
        "self_check passes": str(halfstep.self_check(model, batch, policy=policy).passed),
        f"{case.base}": train(model, batch, case.base).beside(exact),
        f"{policy}": train(model, batch, policy).beside(exact),
        "float16 weights, as is": train(model, batch, case.base, half).beside(exact),
        "float16 weights, policy": train(model, batch, policy, half).beside(exact),
        "and embeddings in fp32": train(model, batch, embedding, half).beside(exact),
    }


def report(kind: str) -> None:
    """Print what became of an architecture; answers that differ by size are separated by |."""
    print(f"\n{kind}, as in {CASES[kind].source}")
    by_size = [answers(kind, layers, width) for layers, width in SIZES]
    for question in by_size[0]:
        each = dict.fromkeys(found[question] for found in by_size)
        print(f"  {question:50} {' | '.join(each)}", flush=True)


def name_of_embedding(model: Any) -> str:
    embedding = model.get_input_embeddings()
    return next(name for name, module in model.named_modules() if module is embedding)


def main() -> None:
    """Try all architectures, or some."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="KIND", default=list(CASES), choices=CASES)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for kind in parser.parse_args().only:
        report(kind)
    print(f"\ntransformers {transformers.__version__}, PyTorch {torch.__version__}")


if __name__ == "__main__":
    main()
