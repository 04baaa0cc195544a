"""Losses as people write them, which overflow or take log(0), each with an exact form.

``judge`` pastes the cure that ``diagnose`` prints and trains with it: the exact loss falls, or not.
"""

# ruff: noqa: N806, SIM
from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tests.diagnose.kinds.judged import run_file
from torch import Tensor, nn

import halfstep
from halfstep import Diagnosis

SOURCE = """\
import torch
import torch.nn.functional as F
from torch import Tensor, nn

torch.manual_seed(0)
x = torch.randn(16, 8)
labels = {labels}
model = nn.Linear(8, {outputs})


{helpers}


{loss}


def step():
    model.zero_grad()
    loss = {name}(model(x) * {gain}, labels)
    loss.backward()
    return loss
"""
STEPS = 40

Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Formula:
    """Loss of the outputs of a linear model and of labels.

    Attributes:
        exact: The same loss, or another that falls with it, in a stable form.
        gain: The factor of the outputs at which the loss is not finite.
        outputs: The number of outputs; with one, the labels are 0 and 1, else classes.
        helpers: The functions that it calls.
    """

    loss: Loss
    exact: Loss
    gain: float = 200.0
    outputs: int = 5
    helpers: tuple[Any, ...] = ()

    @property
    def source(self) -> str:
        is_binary = self.outputs == 1
        loss = inspect.getsource(self.loss)
        return SOURCE.format(
            labels=f"torch.randint(0, {2 if is_binary else 5}, (16,)){'.float()' * is_binary}",
            outputs=self.outputs,
            helpers="\n\n".join(map(inspect.getsource, self.helpers)),
            loss=loss[loss.index("def ") :],
            name=self.loss.__name__,
            gain=self.gain,
        )


FORMULAS: dict[str, Formula] = {}


def formula(exact: Loss, **settings: Any) -> Callable[[Loss], Loss]:
    def add(loss: Loss) -> Loss:
        FORMULAS[loss.__name__] = Formula(loss, exact, **settings)
        return loss

    return add


# --- exact losses ---------------------------------------------------------------------------------


def classes(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out, y)


def binary(out: Tensor, y: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(out.squeeze(1), y)


def pairs(out: Tensor, y: Tensor) -> Tensor:
    z = F.normalize(out, dim=1)
    logits = (z @ z.T / 0.005).masked_fill(torch.eye(len(out)).bool(), -1e9)
    return F.cross_entropy(logits, (torch.arange(len(out)) - 8) % len(out))


def squares(out: Tensor, y: Tensor) -> Tensor:
    return (out.squeeze(1).sigmoid() - y).square().mean()


# --- losses ---------------------------------------------------------------------------------------


@formula(classes)
def ce_softmax_log(out: Tensor, y: Tensor) -> Tensor:
    p = torch.softmax(out, 1)
    return -torch.log(p[torch.arange(len(y)), y]).mean()


@formula(classes)
def ce_softmax_oneline(out: Tensor, y: Tensor) -> Tensor:
    return F.nll_loss(torch.log(F.softmax(out, dim=1)), y)


@formula(classes)
def ce_exp(out: Tensor, y: Tensor) -> Tensor:
    e = torch.exp(out)
    p = e / e.sum(1, keepdim=True)
    return -p.gather(1, y[:, None]).log().mean()


@formula(classes)
def ce_onehot(out: Tensor, y: Tensor) -> Tensor:
    onehot = F.one_hot(y, 5).float()
    return -(onehot * out.softmax(dim=-1).log()).sum(-1).mean()


@formula(classes)
def logsumexp_by_hand(out: Tensor, y: Tensor) -> Tensor:
    return (out.exp().sum(1).log() - out[torch.arange(len(y)), y]).mean()


@formula(classes)
def supcon(out: Tensor, y: Tensor) -> Tensor:
    exp_logits = torch.exp(out)
    log_prob = out - torch.log(exp_logits.sum(1, keepdim=True))
    return -log_prob.gather(1, y[:, None]).mean()


@formula(
    lambda out, y: (
        F.cross_entropy(out, y) + 0.1 * (out.softmax(1) * out.log_softmax(1)).sum(1).mean()
    )
)
def entropy(out: Tensor, y: Tensor) -> Tensor:
    p = out.softmax(1)
    return F.cross_entropy(out, y) - 0.1 * -(p * p.log()).sum(1).mean()


@formula(classes)
def focal(out: Tensor, y: Tensor) -> Tensor:
    p = F.softmax(out, dim=1)
    pt = p.gather(1, y.unsqueeze(1)).squeeze(1)
    return ((1 - pt) ** 2 * -torch.log(pt)).mean()


@formula(
    lambda out, y: F.kl_div(
        out.log_softmax(1), F.one_hot(y, 5).float() * 0.9 + 0.02, reduction="batchmean"
    )
)
def kl_by_hand(out: Tensor, y: Tensor) -> Tensor:
    q = F.softmax(out, 1)
    p = F.one_hot(y, 5).float() * 0.9 + 0.02
    return (p * (p / q).log()).sum(1).mean()


@formula(binary, outputs=1)
def bce(out: Tensor, y: Tensor) -> Tensor:
    p = torch.sigmoid(out.squeeze(1))
    return -(y * torch.log(p) + (1 - y) * torch.log(1 - p)).mean()


@formula(binary, outputs=1)
def softplus(out: Tensor, y: Tensor) -> Tensor:
    return torch.log(1 + torch.exp(-(2 * y - 1) * out.squeeze(1))).mean()


@formula(binary, outputs=1)
def log1p_exp(out: Tensor, y: Tensor) -> Tensor:
    s = 2 * y - 1
    return torch.log1p(torch.exp(-s * out.squeeze(1))).mean()


@formula(binary, outputs=1)
def logsig(out: Tensor, y: Tensor) -> Tensor:
    return -(torch.sigmoid((2 * y - 1) * out.squeeze(1))).log().mean()


@formula(squares, outputs=1)
def sigmoid_hand(out: Tensor, y: Tensor) -> Tensor:
    p = 1 / (1 + torch.exp(-out.squeeze(1)))
    return ((p - y) ** 2).mean()


@formula(squares, outputs=1)
def sigmoid_exp(out: Tensor, y: Tensor) -> Tensor:
    e = out.squeeze(1).exp()
    return ((e / (1 + e) - y) ** 2).mean()


@formula(lambda out, y: (out.squeeze(1) - y).abs().mean(), outputs=1)
def logcosh(out: Tensor, y: Tensor) -> Tensor:
    return torch.log(torch.cosh(out.squeeze(1) - y)).mean()


@formula(pairs, gain=1.0)
def ntxent(out: Tensor, y: Tensor) -> Tensor:
    z = F.normalize(out, dim=1)
    sim = torch.exp(z @ z.T / 0.005)
    eye = torch.eye(len(z))
    neg = (sim * (1 - eye)).sum(1)
    pos = torch.exp((z * z.roll(8, 0)).sum(1) / 0.005)
    return -torch.log(pos / neg).mean()


@formula(pairs, gain=1.0)
def ntxent_rebind(out: Tensor, y: Tensor) -> Tensor:
    z = F.normalize(out, dim=1)
    sim = z @ z.T
    sim = torch.exp(sim / 0.005)
    mask = ~torch.eye(len(z), dtype=torch.bool)
    neg = sim.masked_select(mask).view(len(z), -1).sum(dim=-1)
    pos = torch.exp(torch.sum(z * z.roll(8, 0), dim=-1) / 0.005)
    return (-torch.log(pos / (neg + pos))).mean()


@formula(lambda out, y: F.cross_entropy(out, torch.zeros_like(y)))
def ratio_of_sums(out: Tensor, y: Tensor) -> Tensor:
    pos = torch.exp(out[:, 0])
    neg = torch.exp(out[:, 1:]).sum(1)
    return -torch.log(pos / (pos + neg)).mean()


@formula(
    lambda out, y: -torch.logsumexp(-0.5 * ((y[:, None].float() - out) / 0.5) ** 2, 1).mean(),
    gain=100.0,
)
def mixture_density(out: Tensor, y: Tensor) -> Tensor:
    mu, pi = out, torch.softmax(torch.ones(5), 0)
    prob = pi * torch.exp(-0.5 * ((y[:, None].float() - mu) / 0.5) ** 2)
    return -torch.log(prob.sum(1)).mean()


@formula(lambda out, y: -F.logsigmoid(out).sum(1).mean(), gain=100.0)
def product_of_sigmoids(out: Tensor, y: Tensor) -> Tensor:
    p = torch.sigmoid(out)
    return -torch.log(p.prod(1)).mean()


@formula(classes)
def of_a_module(out: Tensor, y: Tensor) -> Tensor:
    probs = nn.Softmax(dim=1)(out)
    return -torch.log(probs.gather(1, y[:, None])).mean()


def classify(z: Tensor) -> Tensor:
    return torch.softmax(z, dim=1)


@formula(classes, helpers=(classify,))
def of_a_function(out: Tensor, y: Tensor) -> Tensor:
    probs = classify(out)
    return -torch.log(probs.gather(1, y[:, None])).mean()


@formula(lambda out, y: F.softplus(out[:, 0] - out[:, 1]).mean())
def soft_margin(out: Tensor, y: Tensor) -> Tensor:
    d = out[:, 0] - out[:, 1]
    return (1 + d.exp()).log().mean()


@formula(lambda out, y: torch.logaddexp(out[:, 0], out[:, 1]).mean())
def logaddexp(out: Tensor, y: Tensor) -> Tensor:
    return (out[:, 0].exp() + out[:, 1].exp()).log().mean()


@formula(classes)
def sum_of_one_hot(out: Tensor, y: Tensor) -> Tensor:
    p = out.softmax(1)
    return -torch.log((p * F.one_hot(y, 5)).sum(1)).mean()


@formula(lambda out, y: out.square().mean())
def logit_hand(out: Tensor, y: Tensor) -> Tensor:
    p = torch.sigmoid(out)
    return (torch.log(p / (1 - p))).square().mean()


@formula(lambda out, y: F.cross_entropy(out / 1e-3, y), gain=1.0)
def temperature(out: Tensor, y: Tensor) -> Tensor:
    p = (out / 1e-3).exp()
    p = p / p.sum(dim=1, keepdim=True)
    return -(p.log() * F.one_hot(y, 5)).sum(1).mean()


@formula(classes)
def actor(out: Tensor, y: Tensor) -> Tensor:
    probs = F.softmax(out, dim=-1)
    chosen = probs[range(len(y)), y]
    advantage = torch.ones(len(y))
    return -(torch.log(chosen) * advantage).mean()


@formula(lambda out, y: F.softplus(out).mean(), outputs=1)
def discriminator(out: Tensor, y: Tensor) -> Tensor:
    D_fake = torch.sigmoid(out).view(-1)
    return -torch.mean(torch.log(1.0 - D_fake))


@formula(binary, outputs=1)
def discriminator_plus_eps(out: Tensor, y: Tensor) -> Tensor:
    d = torch.sigmoid(out).view(-1)
    return -(y * (d + 1e-45).log() + (1 - y) * (1 - d + 1e-45).log()).mean()


@formula(lambda out, y: -F.logsigmoid(5 * (out[:, 0] - out[:, 1])).mean())
def dpo(out: Tensor, y: Tensor) -> Tensor:
    beta = 5.0
    margin = out[:, 0] - out[:, 1]
    losses = -torch.log(torch.sigmoid(beta * margin))
    return losses.mean()


@formula(lambda out, y: -F.logsigmoid(out[:, 0] - out[:, 1]).mean())
def bradley_terry(out: Tensor, y: Tensor) -> Tensor:
    a, b = out[:, 0], out[:, 1]
    p = torch.exp(a) / (torch.exp(a) + torch.exp(b))
    return -torch.log(p).mean()


@formula(lambda out, y: F.cross_entropy(out, torch.zeros_like(y)))
def info_nce(out: Tensor, y: Tensor) -> Tensor:
    pos = out[:, :1]
    neg = out[:, 1:]
    logits = torch.cat([pos, neg], dim=1)
    exp = torch.exp(logits)
    return -torch.log(exp[:, 0] / exp.sum(dim=1)).mean()


@formula(pairs, gain=1.0)
def simclr_public(out: Tensor, y: Tensor) -> Tensor:
    z = F.normalize(out, dim=-1)
    sim_matrix = torch.exp(torch.mm(z, z.t().contiguous()) / 0.005)
    mask = (torch.ones_like(sim_matrix) - torch.eye(len(z), device=sim_matrix.device)).bool()
    sim_matrix = sim_matrix.masked_select(mask).view(len(z), -1)
    pos_sim = torch.exp(torch.sum(z * z.roll(8, 0), dim=-1) / 0.005)
    return (-torch.log(pos_sim / sim_matrix.sum(dim=-1))).mean()


def proxies() -> Tensor:
    near = 0.01 * torch.eye(5)
    near[:, 0] += 1
    return F.normalize(near, dim=1)


@formula(
    lambda out, y: F.cross_entropy(
        -(torch.cdist(F.normalize(out, dim=1), proxies()) ** 2) * 100, y
    ),
    gain=1.0,
    helpers=(proxies,),
)
def proxy_nca(out: Tensor, y: Tensor) -> Tensor:
    P = proxies()
    X = F.normalize(out, dim=1)
    D = torch.cdist(X, P) ** 2 * 100
    d_pos = D[torch.arange(len(y)), y]
    sum_all = torch.exp(-D).sum(dim=1)
    return (d_pos + torch.log(sum_all)).mean()


@formula(lambda out, y: F.binary_cross_entropy_with_logits(out, F.one_hot(y, 5).float()) * 5)
def multilabel(out: Tensor, y: Tensor) -> Tensor:
    p = 1 / (1 + (-out).exp())
    t = F.one_hot(y, 5)
    return -(t * p.log() + (1 - t) * (1 - p).log()).sum(1).mean()


@formula(classes)
def entropy_in_bits(out: Tensor, y: Tensor) -> Tensor:
    p = F.softmax(out, -1)
    return F.cross_entropy(out, y) + (p * torch.log2(p)).sum(-1).mean()


@formula(classes)
def jensen_shannon(out: Tensor, y: Tensor) -> Tensor:
    p, q = F.softmax(out, 1), F.softmax(out.roll(1, 0).detach(), 1)
    m = (p + q) / 2
    return (
        F.cross_entropy(out, y)
        + 0.1 * ((p * (p / m).log()).sum(1) + (q * (q / m).log()).sum(1)).mean() / 2
    )


@formula(lambda out, y: (F.logsigmoid(out.squeeze(1)) + 0.6931).square().mean(), outputs=1)
def squared_log(out: Tensor, y: Tensor) -> Tensor:
    s = torch.sigmoid(out.squeeze(1))
    return ((torch.log(s) - torch.log(torch.full_like(s, 0.5))) ** 2).mean()


class Criterion(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.t = 0.5

    def forward(self, z: Tensor, target: Tensor) -> Tensor:
        e = torch.exp(z / self.t)
        p = e / torch.sum(e, dim=1, keepdim=True)
        return -torch.mean(torch.log(torch.gather(p, 1, target.unsqueeze(1))))


@formula(classes, helpers=(Criterion,))
def in_a_method(out: Tensor, y: Tensor) -> Tensor:
    return Criterion()(out, y)


@formula(classes)
def plus_eps(out: Tensor, y: Tensor) -> Tensor:
    e = torch.exp(out)
    p = e / (e.sum(1, keepdim=True) + 1e-8)
    return F.nll_loss(torch.log(p + 1e-45), y)


# --- judgement ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Judged:
    """Diagnosis of a formula, and the exact loss before and after training with the cure.

    ``after`` is NaN if there is nothing to paste, or if the training ended with inf or NaN.
    """

    found: Diagnosis
    before: float = math.nan
    after: float = math.nan

    @property
    def learns(self) -> bool:
        return self.after < 0.99 * self.before


def judge(name: str, folder: Path) -> Judged:
    """Diagnose a formula, paste the cure, and train with it."""
    source = FORMULAS[name].source
    found = halfstep.diagnose(run_file(source, folder / f"{name}.py")["step"])
    if found.cure is None or not found.cure.edits:
        return Judged(found)
    return Judged(
        found, *descend(FORMULAS[name], run_file(pasted(source, found), folder / "cured.py"))
    )


def pasted(source: str, found: Diagnosis) -> str:
    assert found.cure is not None
    lines = source.splitlines()
    for edit in sorted(found.cure.edits, key=lambda edit: -edit.first):
        lines[edit.first - 1 : edit.last] = edit.text.splitlines()
    return "\n".join(lines) + "\n"


def descend(formula: Formula, names: dict[str, Any]) -> tuple[float, float]:
    """Take steps of 2 % of the norm of each parameter; return the exact loss before and after."""
    model: nn.Module = names["model"]
    before = _exact(formula, names)
    for _ in range(STEPS):
        loss = names["step"]()
        gradients = [each.grad for each in model.parameters() if each.grad is not None]
        if not all(bool(each.isfinite().all()) for each in (loss, *gradients)):
            return before, math.nan
        with torch.no_grad():
            for each, gradient in zip(model.parameters(), gradients, strict=True):
                each -= 0.02 * each.norm() * gradient / gradient.norm().clamp_min(1e-6)
    return before, _exact(formula, names)


def _exact(formula: Formula, names: dict[str, Any]) -> float:
    with torch.no_grad():
        out = names["model"](names["x"]) * formula.gain
        return float(formula.exact(out, names["labels"]))
