"""The same faults in the many forms in which code is written."""

from __future__ import annotations

from tests.diagnose.kinds.program import Program, Variety, kind


def _zeros(v: Variety, ops: str, loss: str, *, setup: str | None = None) -> Program:
    """A program in which ``h`` is zero where the batch is bad."""
    return v.program(
        "maths",
        ops,
        number=("keep", "1.0", "0.0"),
        setup=setup,
        inputs=4,
        outputs=4,
        dtypes=(None, "bfloat16"),
        loss=f"h = model(x).float() * keep\n{loss}",
    )


@kind
def in_place(v: Variety) -> Program:
    line = v.one_of("p.log_()", "p.log2_()", "p.reciprocal_()", "p.rsqrt_()", "p.div_(p.sum())")
    return _zeros(
        v,
        "log_ log2_ reciprocal_ rsqrt_ div_",
        f"p = h.abs() * 1.0\n{line}  # bad\nloss = p.mean()",
    )


@kind
def augmented(v: Variety) -> Program:
    return _zeros(
        v,
        "div_",
        "p = h.abs() * 1.0\np /= p.detach().sum(-1, keepdim=True)  # bad\nloss = p.mean()",
    )


@kind
def in_a_lambda(v: Variety) -> Program:
    return _zeros(
        v,
        "log",
        "loss = entropy(h.abs())",
        setup="""
            model = nn.Linear(4, 4)
            entropy = lambda p: -(p * p.log()).sum(-1).mean()  # bad
        """,
    )


@kind
def in_a_method(v: Variety) -> Program:
    norm = v.one_of("z.norm(dim=-1, keepdim=True)", "z.pow(2).sum(-1, keepdim=True).sqrt()")
    return _zeros(
        v,
        "div sqrt",
        "loss = criterion_module(h)",
        setup=f"""
            model = nn.Linear(4, 4)


            class Criterion(nn.Module):
                def __init__(self, weight=1.0):
                    super().__init__()
                    self.weight = weight

                def forward(self, z):
                    length = {norm}  # bad
                    return self.weight * (z / length).mean()  # bad


            criterion_module = Criterion()
        """,
    )


@kind
def over_several_lines(v: Variety) -> Program:
    return _zeros(
        v,
        "log",
        """loss = (
    h.abs()
    .log()  # bad
    .mean()
)""",
    )


@kind
def in_a_function_of_torch(v: Variety) -> Program:
    line = v.one_of(
        "loss = F.gaussian_nll_loss(h, h.abs().log().exp(), h.abs() + 1)  # bad",
        "loss = torch.stack([part.abs().log() for part in h]).mean()  # bad",
        "loss = sum(torch.log(part.abs()).mean() for part in h)  # bad",
        "loss = torch.cat([h.abs().log(), h], dim=-1).mean()  # bad",
    )
    return _zeros(v, "log", line)


@kind
def own_function(v: Variety) -> Program:
    return _zeros(
        v,
        "log",
        "loss = Log.apply(h.abs()).mean()",
        setup="""
            class Log(torch.autograd.Function):
                @staticmethod
                def forward(ctx, x):
                    ctx.save_for_backward(x)
                    return x.log()  # bad

                @staticmethod
                def backward(ctx, gradient):
                    x, = ctx.saved_tensors
                    return gradient / x.clamp_min(1e-3)


            model = nn.Linear(4, 4)
        """,
    )


@kind
def modules_of_torch(v: Variety) -> Program:
    layer = v.one_of("nn.Softmax(dim=-1)", "nn.LogSoftmax(dim=-1)", "nn.Softmin(dim=-1)")
    sign = "-" if "min" in layer else ""
    return v.program(
        "maths",
        "_softmax _log_softmax",
        gives="x, mask",
        setup=f"model = nn.Linear(4, 4)\nnormalize = {layer}",
        inputs=4,
        batch="mask = torch.zeros(x.shape[0], 4, dtype=torch.bool)",
        bad="mask[1] = True",
        dtypes=(None, "bfloat16"),
        loss=f"""
            scores = model(x).float().masked_fill(mask, -math.inf)
            loss = normalize({sign}scores).clamp_min(-9).square().mean()  # bad
        """,
    )


@kind
def similarity_module(v: Variety) -> Program:
    layer = v.one_of("nn.CosineSimilarity(dim=-1, eps=0.0)", "nn.CosineSimilarity(eps=0.0)")
    return _zeros(
        v,
        "div sqrt",
        "loss = similar(h, torch.ones_like(h)).mean()  # bad",
        setup=f"model = nn.Linear(4, 4)\nsimilar = {layer}",
    )


@kind
def einsum_overflows(v: Variety) -> Program:
    call = v.one_of('torch.einsum("bd,cd->bc", q, q)', "torch.matmul(q, q.t())", "q.mm(q.t())")
    return v.program(
        "maths",
        "bmm mm matmul",
        number=("gain", "1.0", "1e25"),
        linear=(4, 4),
        dtypes=(None,),
        loss=f"q = gain * model(x)\nloss = {call}.mean()  # bad",
    )


@kind
def squares_overflow(v: Variety) -> Program:
    call = v.one_of("q.pow(2)", "q ** 2", "q.square()", "q * q")
    return v.program(
        "maths",
        "pow mul square",
        number=("gain", "1.0", "1e25"),
        linear=(4, 4),
        dtypes=(None,),
        loss=f"q = gain * model(x)\nloss = ({call}).mean()  # bad",
    )


@kind
def growing_recurrence(v: Variety) -> Program:
    return v.program(
        "maths",
        "mul add mm addmm",
        number=("rate", "0.5", "30.0"),
        linear=(4, 4),
        dtypes=(None,),
        loss="""
            h = model(x)
            for _ in range(40):
                h = rate * h + x  # bad
            loss = h.abs().mean()
        """,
    )


@kind
def distribution(v: Variety) -> Program:
    name = v.one_of("Normal", "Laplace", "Cauchy")
    return v.program(
        "maths",
        "div pow mul",
        gives="x, y, shift",
        linear=(4, 8),
        batch="y = torch.randn(x.shape[0], 4)\nshift = 0.0",
        bad="shift = -95.0",
        dtypes=(None,),
        loss=f"""
            mean, raw = model(x).chunk(2, -1)
            scale = torch.exp(raw + shift)
            policy = torch.distributions.{name}(mean, scale)
            loss = -policy.log_prob(y).mean()  # bad
        """,
    )


@kind
def scaled_dot_product(v: Variety) -> Program:
    return v.program(
        "maths",
        "div mm bmm",
        gives="x, width",
        linear=(6, 6),
        batch="x, width = torch.randn(2, 5, 6), 6",
        bad="width = 0",
        loss="""
            q = model(x)
            scores = q @ q.transpose(1, 2) / width ** 0.5  # bad
            loss = (scores.softmax(-1) @ q).float().square().mean()
        """,
    )


@kind
def module_hook(v: Variety) -> Program:
    return v.program(
        "maths",
        "div",
        setup="""
            def rescale(module, inputs, outputs):
                return tuple(g / g.abs().amax() for g in inputs)  # bad


            model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
            model[2].register_full_backward_hook(rescale)
        """,
        inputs=4,
        number=("keep", "1.0", "0.0"),
        dtypes=(None,),
        loss="loss = (model(x) * keep).square().mean()",
    )


@kind
def logit_by_hand(v: Variety) -> Program:
    return v.program(
        "maths",
        "div log",
        number=("gain", "1.0", "1e4"),
        dtypes=(None,),
        loss="""
            p = torch.sigmoid(gain * model(x))
            loss = torch.log(p / (1 - p)).abs().mean()  # bad
        """,
    )


@kind
def variance_of_one(v: Variety) -> Program:
    call = v.one_of("torch.std_mean(h, dim=0)", "torch.var_mean(h, dim=0)")
    return v.program(
        "maths",
        "std_mean var_mean",
        bad="x = x[:1]",
        dtypes=(None,),
        loss=f"h = model(x)\nspread, mean = {call}  # bad\nloss = (spread + mean).mean()",
    )


@kind
def two_faults(v: Variety) -> Program:
    return _zeros(
        v,
        "log div sqrt",
        """a = torch.log(h.abs()).mean()  # bad
b = (h / h.abs().sum()).mean()  # bad
loss = a + b""",
    )


@kind
def three_faults(v: Variety) -> Program:
    return _zeros(
        v,
        "log div sqrt",
        """p = h.abs()
a = torch.log(p).mean()  # bad
b = p / p.sum()  # bad
loss = a + b.mean() + p.sum(-1).sqrt().mean()  # bad""",
    )


@kind
def root_mean_square(v: Variety) -> Program:
    call = v.one_of(
        "h.pow(2).mean().sqrt()", "torch.sqrt(F.mse_loss(h, h * 0))", "h.square().mean() ** 0.5"
    )
    return _zeros(v, "sqrt pow", f"loss = {call}  # bad")


@kind
def signed_root(v: Variety) -> Program:
    return _zeros(v, "sqrt", "loss = (h.sign() * h.abs().sqrt()).mean()  # bad")


@kind
def negative_base(v: Variety) -> Program:
    return v.program(
        "maths",
        "pow sqrt log",
        number=("shift", "9.0", "-9.0"),
        loss="u = model(x).float() + shift\nloss = (u ** 0.3).mean() + u.mean()  # bad",
    )
