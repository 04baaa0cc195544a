"""Models with parameters in lower precision, and bad tensors from outside of the step."""

from __future__ import annotations

from tests.diagnose.kinds.program import Program, Variety, kind


def _half(v: Variety, ops: str, layer: str, **given: str) -> Program:
    """A model of two linear layers with a layer between them, all in float16."""
    width = v.size(4, 9)
    return v.program(
        "range",
        ops,
        gives="x, gain",
        setup=f"""
            class Layer(nn.Module):
                def forward(self, h):
                    {layer}


            model = nn.Sequential(nn.Linear(4, {width}), Layer(), nn.Linear({width}, 2)).half()
        """,
        inputs=4,
        batch="x, gain = x.half(), 1.0",
        dtypes=(None,),
        **given,  # type: ignore[arg-type]
    )


@kind
def half_rms_norm(v: Variety) -> Program:
    square = v.one_of("h.pow(2)", "h * h", "h.square()")
    return _half(
        v,
        "pow mul square mean",
        f"return h * (({square}).mean(-1, keepdim=True) + 1)  # bad",
        bad="gain = 3e3",
        loss="loss = model(x * gain).float().abs().log1p().mean()",
    )


@kind
def half_eps(v: Variety) -> Program:
    eps = v.one_of("1e-12", "1e-9", "1e-8")
    return v.program(
        "range",
        "div",
        gives="x, gain",
        setup="model = nn.Linear(4, 5, bias=False).half()",
        inputs=4,
        batch="x, gain = x.half(), 1.0",
        bad="gain = 0.0",
        dtypes=(None,),
        loss=f"""
            h = model(x) * gain
            unit = h / (h.abs().sum(-1, keepdim=True) + {eps})  # bad
            loss = unit.float().square().mean()
        """,
    )


@kind
def half_normalize(v: Variety) -> Program:
    call = v.one_of("F.normalize(h, dim=-1)", "F.normalize(h)")
    return v.program(
        "range",
        "div clamp_min",
        gives="x, gain",
        setup="model = nn.Linear(4, 5, bias=False).half()",
        inputs=4,
        batch="x, gain = x.half(), 1.0",
        bad="gain = 0.0",
        dtypes=(None,),
        loss=f"h = model(x) * gain\nloss = {call}.float().sum()  # bad",
    )


@kind
def half_scores(v: Variety) -> Program:
    return v.program(
        "range",
        "mm bmm matmul",
        gives="x, gain",
        setup="model = nn.Linear(8, 8).half()",
        inputs=8,
        batch="x, gain = torch.randn(2, 5, 8).half(), 1.0",
        bad="gain = 2e3",
        dtypes=(None,),
        loss="""
            q = model(x * gain)
            scores = q @ q.transpose(-1, -2)  # bad
            loss = (scores.float().softmax(-1).to(q.dtype) @ q).float().abs().mean() / gain
        """,
    )


@kind
def half_variance(v: Variety) -> Program:
    return v.program(
        "range",
        "sum mean mul",
        gives="x, gain",
        setup="model = nn.Linear(8, 8).half()",
        inputs=8,
        batch="x, gain = torch.randn(40, 8).half(), 1.0",
        bad="gain = 2e4",
        dtypes=(None,),
        loss="""
            h = model(x).abs() + 1
            loss = (gain * h).sum() / 1e6  # bad
        """,
    )


# --- by hand --------------------------------------------------------------------------------------


@kind
def half_by_hand(v: Variety) -> Program:
    cast = v.one_of(".half()", ".to(torch.float16)", ".type(torch.float16)")
    return v.program(
        "range",
        "mul",
        number=("gain", "1.0", "3e2"),
        dtypes=(None,),
        loss=f"""
            h = (gain * (1 + model(x).abs())){cast}
            loss = (h * h).float().mean() / 1e6  # bad
        """,
    )


@kind
def teacher_gone_bad(v: Variety) -> Program:
    name = v.one_of("teacher", "ema", "target_net")
    return v.program(
        "data",
        f"{name}.weight",
        setup=f"model = nn.Linear(4, 3)\n{name} = nn.Linear(4, 3)",
        inputs=4,
        bad=f"nn.init.constant_({name}.weight, math.nan)",
        loss=f"""
            with torch.no_grad():
                goal = {name}(x)  # bad
            loss = F.mse_loss(model(x), goal)
        """,
    )


@kind
def bad_batch(v: Variety) -> Program:
    value = v.one_of("math.nan", "math.inf", "-math.inf")
    return v.program(
        "data", "x", bad=f"x[1, 0] = {value}", loss="loss = model(x).float().mean()  # bad"
    )


@kind
def bad_target(v: Variety) -> Program:
    return v.program(
        "data",
        "y",
        gives="x, y",
        batch="y = torch.randn(x.shape[0])",
        bad="y[0] = math.nan",
        loss="loss = F.mse_loss(model(x).float().sum(-1), y)  # bad",
    )


@kind
def bad_constant(v: Variety) -> Program:
    name = v.one_of("table", "class_weight", "frequencies")
    return v.program(
        "data",
        name,
        setup=f"model = nn.Linear(4, 3)\n{name} = torch.ones(3)",
        inputs=4,
        bad=f"{name}[1] = math.inf",
        loss=f"loss = (model(x).float() * {name}).square().mean()  # bad",
    )
