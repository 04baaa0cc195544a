"""Functions of PyTorch where they are not defined, or their slope is not."""

from __future__ import annotations

from tests.diagnose.kinds.program import Program, Variety, kind


def _at_zero(v: Variety, ops: str, loss: str, **given: object) -> Program:
    """A function of ``h``, a part of which is exactly zero in a bad batch."""
    name = v.one_of("h", "z", "feats")
    return v.program(  # type: ignore[arg-type]
        "maths",
        ops,
        gives="x, keep",
        batch="keep = torch.ones(x.shape[0], 1)",
        bad="keep[0] = 0",
        dtypes=given.pop("dtypes", (None, "bfloat16")),  # type: ignore[arg-type]
        loss=f"{name} = model(x).float() * keep\n" + loss.replace("h!", name),
        **given,  # type: ignore[arg-type]
    )


@kind
def norm_as_divisor(v: Variety) -> Program:
    norm = v.one_of("h!.norm(dim=-1, keepdim=True)", "torch.linalg.vector_norm(h!, dim=1)[:, None]")
    return _at_zero(v, "div", f"unit = h! / {norm}  # bad\nloss = unit.sum(-1).square().mean()")


@kind
def normalize_without_eps(v: Variety) -> Program:
    return _at_zero(v, "div", "loss = F.normalize(h!, dim=-1, eps=0.0).sum()  # bad")


@kind
def cosine_without_eps(v: Variety) -> Program:
    return _at_zero(
        v, "div sqrt", "loss = F.cosine_similarity(h!, torch.ones_like(h!), eps=0.0).mean()  # bad"
    )


@kind
def root_of_variance(v: Variety) -> Program:
    call = v.one_of("h!.var(dim=-1).sqrt()", "torch.sqrt(h!.var(-1))", "h!.var(1) ** 0.5")
    return _at_zero(v, "sqrt pow", f"loss = ({call}).mean()  # bad")


@kind
def where_with_a_bad_branch(v: Variety) -> Program:
    branch = v.one_of("h!.abs().log()", "torch.log(h!.abs())", "h!.abs().sqrt()", "1 / h!.abs()")
    return _at_zero(
        v,
        "log sqrt reciprocal abs",
        f"y = torch.where(h!.abs() > 0, {branch}, torch.zeros_like(h!))  # bad\nloss = y.mean()",
    )


@kind
def fractional_power(v: Variety) -> Program:
    power = v.one_of("0.5", "0.3", "(1 / 2.2)")
    form = v.one_of(
        f"h!.abs() ** {power}", f"h!.abs().pow({power})", f"torch.pow(h!.abs(), {power})"
    )
    return _at_zero(v, "pow sqrt", f"loss = ({form}).mean()  # bad")


@kind
def hypotenuse_of_zero(v: Variety) -> Program:
    return _at_zero(v, "hypot", "loss = torch.hypot(h![:, 0], h![:, 1]).mean()  # bad")


@kind
def x_log_x(v: Variety) -> Program:
    line = v.one_of(
        "loss = (p * p.log()).sum(-1).mean()  # bad",
        "loss = torch.sum(p * torch.log(p), dim=-1).mean()  # bad",
        "loss = -(p * torch.log2(p)).mean()  # bad",
    )
    return _at_zero(v, "log log2", f"p = h!.abs()\n{line}")


@kind
def xlogy_at_zero(v: Variety) -> Program:
    return _at_zero(v, "xlogy", "loss = torch.xlogy(h!.abs(), h!.abs()).mean()  # bad")


@kind
def digamma_at_zero(v: Variety) -> Program:
    name = v.one_of("digamma", "lgamma")
    return _at_zero(v, "digamma lgamma", f"loss = torch.{name}(h!.abs()).mean()  # bad")


@kind
def dirichlet_evidence(v: Variety) -> Program:
    return _at_zero(
        v,
        "lgamma digamma",
        """alpha = h!.abs()
total = alpha.sum(-1)
terms = torch.lgamma(alpha).sum(-1)  # bad
loss = (torch.lgamma(total + 1) - terms).mean()""",
    )


@kind
def acos_of_cosine(v: Variety) -> Program:
    name = v.one_of("acos", "asin")
    return v.program(
        "maths",
        "acos asin",
        gives="x, sign",
        batch="sign = torch.tensor([1.0, -1.0])",
        bad="sign = torch.ones(2)",
        outputs=4,
        dtypes=(None,),
        loss=f"""
            a = model(x).sum(-1, keepdim=True) + torch.tensor([9.0, 9.0])
            b = a.detach() * sign
            cosine = (a / a.detach().abs() * b / b.detach().abs()).mean(-1)
            loss = torch.{name}(cosine).mean()  # bad
        """,
    )


@kind
def atanh_of_one(v: Variety) -> Program:
    call = v.one_of("torch.atanh(u)", "u.atanh()", "torch.erfinv(u)", "torch.special.erfinv(u)")
    return v.program(
        "maths",
        "atanh erfinv",
        number=("gain", "0.1", "1e4"),
        dtypes=(None,),
        loss=f"u = torch.tanh(gain * model(x))\nloss = {call}.square().mean()  # bad",
    )


@kind
def logit_of_one(v: Variety) -> Program:
    call = v.one_of("torch.logit(p)", "p.logit()", "torch.special.logit(p)")
    return v.program(
        "maths",
        "logit",
        number=("gain", "0.1", "1e4"),
        dtypes=(None,),
        loss=f"p = torch.sigmoid(gain * model(x))\nloss = {call}.abs().mean()  # bad",
    )


@kind
def acosh_below_one(v: Variety) -> Program:
    call = v.one_of("torch.acosh(d)", "d.acosh()", "torch.arccosh(d)")
    return v.program(
        "maths",
        "acosh",
        gives="x, other",
        batch="other = torch.randn_like(x)",
        bad="other = x.clone()",
        dtypes=(None,),
        loss=f"""
            a, b = model(x), model(other)
            d = 1 + 2 * (a - b).square().sum(-1)
            loss = {call}.mean()  # bad
        """,
    )


@kind
def std_of_one(v: Variety) -> Program:
    call = v.one_of("h.std(0)", "torch.std(h, dim=0)", "h.var(0)", "h.std(dim=0, keepdim=True)")
    return v.program(
        "maths",
        "std var",
        bad="x = x[:1]",
        loss=f"""
            h = model(x).float()
            loss = (h.mean(0) + {call}).square().mean()  # bad
        """,
    )


@kind
def standardized(v: Variety) -> Program:
    return (
        v.program(
            "maths",
            "div",
            bad="x = x[:1].expand_as(x).clone()",
            dtypes=(None,),
            loss="""
            h = model(x * 0 + x.mean())
            h = (h - h.mean(0)) / h.detach().sub(h.detach()[0]).abs().amax(0)  # bad
            loss = h.square().mean()
        """,
        )
        if False
        else v.program(
            "maths",
            "div",
            gives="x, reward",
            batch="reward = torch.randn(x.shape[0])",
            bad="reward = torch.zeros(x.shape[0])",
            loss="""
            advantage = (reward - reward.mean()) / reward.std()  # bad
            loss = -(model(x).float().log_softmax(-1)[:, 0] * advantage).mean()
        """,
        )
    )


@kind
def log_add_exp(v: Variety) -> Program:
    call = v.one_of(
        "torch.logaddexp(s, s.flip(0))",
        "torch.logsumexp(s, dim=-1)",
        "s.logsumexp(-1)",
        "torch.logcumsumexp(s, dim=-1)[:, -1]",
    )
    return v.program(
        "maths",
        "logaddexp logsumexp logcumsumexp masked_fill",
        gives="x, mask",
        batch="mask = torch.zeros(x.shape[0], 4, dtype=torch.bool)",
        bad="mask[:] = True",
        outputs=4,
        dtypes=(None, "bfloat16"),
        loss=f"""
            s = model(x).float().masked_fill(mask, -math.inf)  # bad
            loss = {call}.mean()  # bad
        """,
    )


@kind
def inf_minus_inf(v: Variety) -> Program:
    line = v.one_of(
        "w = torch.exp(s - s.amax(-1, keepdim=True))  # bad",
        "w = (s - s.max(dim=-1, keepdim=True).values).exp()  # bad",
    )
    return v.program(
        "maths",
        "sub",
        gives="x, mask",
        batch="mask = torch.zeros(x.shape[0], 4, dtype=torch.bool)",
        bad="mask[0] = True",
        outputs=4,
        loss=f"""
            s = model(x).float().masked_fill(mask, -math.inf)
            {line}
            loss = (w / w.sum(-1, keepdim=True)).square().mean()
        """,
    )


@kind
def zero_times_inf(v: Variety) -> Program:
    inf = v.one_of("-math.inf", 'float("-inf")', "-torch.inf")
    return (
        v.program(
            "maths",
            "mul",
            gives="x, mask",
            batch="mask = torch.ones(x.shape[0], 4)",
            bad="mask[0, 1:] = 0",
            outputs=4,
            loss=f"""
            bias = (1 - mask) * {inf}  # bad
            loss = (model(x).float() + bias).softmax(-1).square().mean()
        """,
        )
        if False
        else v.program(
            "maths",
            "mul",
            gives="x, mask",
            batch="mask = torch.ones(x.shape[0], 4)",
            bad="mask[0] = 0",
            outputs=4,
            dtypes=(None,),
            loss=f"""
            logp = model(x).log_softmax(-1).masked_fill(mask == 0, {inf})
            loss = -(logp * mask).sum(-1).mean()  # bad
        """,
        )
    )


@kind
def exp_of_large(v: Variety) -> Program:
    call = v.one_of("torch.exp(h)", "h.exp()", "torch.expm1(h)", "torch.cosh(h)", "2 ** (2 * h)")
    return v.program(
        "maths",
        "exp expm1 cosh pow exp2",
        number=("gain", "1.0", "1e4"),
        dtypes=(None,),
        loss=f"h = gain * model(x).abs()\nloss = {call}.mean()  # bad",
    )


@kind
def softplus_by_hand(v: Variety) -> Program:
    return v.program(
        "maths",
        "exp",
        number=("gain", "1.0", "1e5"),
        dtypes=(None,),
        loss="""
            h = gain * model(x).abs()
            loss = torch.log1p(torch.exp(h)).mean()  # bad
        """,
    )


@kind
def inverse_softplus(v: Variety) -> Program:
    return v.program(
        "maths",
        "expm1 log",
        number=("gain", "1.0", "0.0"),
        dtypes=(None,),
        loss="""
            h = gain * model(x).abs()
            loss = torch.log(torch.expm1(h)).clamp_min(-5).mean()  # bad
        """,
    )


@kind
def temperature_zero(v: Variety) -> Program:
    name = v.one_of("temperature", "tau", "T")
    line = v.one_of(
        f"p = (model(x).float() / {name}).softmax(-1)  # bad",
        f"p = torch.softmax(model(x).float() / {name}, dim=-1)  # bad",
        f"p = F.gumbel_softmax(model(x).float(), tau={name})  # bad",
    )
    return v.program(
        "maths",
        "div",
        gives=f"x, {name}",
        batch=f"{name} = 1.0",
        bad=f"{name} = 0.0",
        loss=f"{line}\nloss = p.square().mean()",
    )


@kind
def discriminator_log(v: Variety) -> Program:
    return v.program(
        "maths",
        "log",
        number=("gain", "1.0", "1e5"),
        dtypes=(None,),
        loss="""
            real, fake = torch.sigmoid(gain * model(x)).chunk(2)
            real_term = real.clamp(1e-3, 1 - 1e-3).log().mean()
            fake_term = torch.log(
                1 - fake
            ).mean()
            loss = -(real_term + fake_term)
        """.replace("fake_term = torch.log(\n", "fake_term = torch.log(  # bad\n"),
    )
