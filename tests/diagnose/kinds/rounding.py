"""Values that a lower precision cannot hold, or rounds to what no function can take."""

from __future__ import annotations

from tests.diagnose.kinds.program import Program, Variety, kind

_HALF = ("float16",)


@kind
def one_minus_sigmoid(v: Variety) -> Program:
    line = v.one_of(
        "loss = -torch.log(1 - p).mean()  # bad",
        "loss = -(1 - p).log().mean()  # bad",
    )
    return v.program(
        "range",
        "log",
        number=("shift", "0.0", "12.0"),
        dtypes=("float16", "bfloat16"),
        loss=f"p = torch.sigmoid(model(x).tanh() + shift)\n{line}",
    )


@kind
def eps_of_float32(v: Variety) -> Program:
    eps = v.one_of("1e-12", "1e-10", "1e-8")
    return v.program(
        "range",
        "div reciprocal log rsqrt",
        number=("keep", "1.0", "0.0"),
        dtypes=_HALF,
        loss=f"""
            h = model(x) * keep
            unit = h / (h.abs().amax(-1, keepdim=True) + {eps})  # bad
            loss = unit.float().square().mean()
        """,
    )


@kind
def squares_in_half(v: Variety) -> Program:
    square = v.one_of("h * h", "h.mul(h)", "torch.mul(h, h)")
    return v.program(
        "range",
        "mul pow square",
        number=("gain", "1.0", "1e3"),
        dtypes=_HALF,
        loss=f"""
            h = (1 + model(x).abs()) * gain
            loss = F.layer_norm({square}, (h.shape[-1],)).float().abs().mean()  # bad
        """,
    )


@kind
def rms_norm_in_half(v: Variety) -> Program:
    return (
        v.program(
            "range",
            "pow square mul mean",
            number=("gain", "1.0", "1e4"),
            setup="""
            class Norm(nn.Module):
                def forward(self, h):
                    variance = h.pow(2).mean(-1, keepdim=True)  # bad
                    return h / torch.sqrt(variance)


            model = nn.Sequential(nn.Linear(4, 8), nn.Hardtanh(-5e4, 5e4), Norm(), nn.Linear(8, 2))
        """,
            inputs=4,
            dtypes=_HALF,
            loss="loss = (model(x * gain) / gain).float().square().mean() + 0 * gain",
        )
        if False
        else v.program(
            "range",
            "pow square mul mean",
            number=("gain", "1.0", "3e3"),
            setup="""
            class Norm(nn.Module):
                def forward(self, h):
                    return h * (h * h).mean(-1, keepdim=True)  # bad


            model = nn.Sequential(nn.Linear(4, 8), Norm(), nn.Linear(8, 2))
        """,
            inputs=4,
            dtypes=_HALF,
            loss="loss = model(x * gain).float().abs().log1p().mean()",
        )
    )


@kind
def attention_scores_in_half(v: Variety) -> Program:
    return v.program(
        "range",
        "bmm mm matmul",
        gives="x, gain",
        linear=(8, 8),
        batch="x = torch.randn(2, 5, 8)\ngain = 1.0",
        bad="gain = 1e3",
        dtypes=_HALF,
        loss="""
            q = model(x * gain)
            scores = q @ q.transpose(-1, -2)  # bad
            loss = (scores.softmax(-1) @ q).float().abs().mean() / gain
        """,
    )


@kind
def sum_in_half(v: Variety) -> Program:
    total = v.one_of("low.sum()", "torch.sum(low)", "low.sum(dim=0).sum()")
    return v.program(
        "range",
        "sum",
        number=("gain", "1.0", "1e4"),
        dtypes=(None,),
        loss=f"""
            low = ((1 + model(x).abs()) * gain).half()
            loss = {total}.float() / 1e6  # bad
        """,
    )


@kind
def scale_too_large(v: Variety) -> Program:
    return v.program(
        "scale",
        "mm mul mse_loss addmm _to_copy div mse_loss_backward expand linear",
        number=("gain", "1.0", "500.0"),
        dtypes=_HALF,
        scales=(2.0**12,),
        loss="""
            out = model(x) * gain  # bad
            loss = out.float().square().mean()  # bad
        """,
    )
