"""Attention, graphs, flows, GANs, state spaces, and functions with a backward of their own."""

from __future__ import annotations

from tests.diagnose.kinds.program import Program, Variety, kind

_FEATURES = "model = nn.Linear(6, 6)"


@kind
def fully_masked_attention(v: Variety) -> Program:
    softmax = v.one_of(
        "scores.softmax(-1)", "torch.softmax(scores, dim=-1)", "F.softmax(scores, -1)"
    )
    return v.program(
        "maths",
        "_softmax",
        gives="x, padding",
        setup=_FEATURES,
        inputs=6,
        batch="x = torch.randn(2, 5, 6)\npadding = torch.zeros(2, 5, dtype=torch.bool)",
        bad="padding[0] = True",
        loss=f"""
            q = model(x)
            scores = (q @ q.transpose(1, 2)) / 6 ** 0.5
            scores = scores.masked_fill(padding[:, None, :], float("-inf"))
            out = {softmax} @ q  # bad
            loss = out.float().square().mean()
        """,
    )


@kind
def fully_masked_module(v: Variety) -> Program:
    heads = v.one_of("1", "2", "3")
    return v.program(
        "maths",
        "_softmax",
        gives="x, padding",
        setup=f"""
            class Block(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.attention = nn.MultiheadAttention(6, {heads}, batch_first=True)

                def forward(self, x, padding):
                    out, _ = self.attention(x, x, x, key_padding_mask=padding)  # bad
                    return x + out

            model = Block()
        """,
        inputs=6,
        batch="x = torch.randn(2, 5, 6)\npadding = torch.zeros(2, 5, dtype=torch.bool)",
        bad="padding[0] = True",
        dtypes=(None, "bfloat16"),
        loss="loss = model(x, padding).float().square().mean()",
    )


@kind
def masks_added(v: Variety) -> Program:
    return v.program(
        "range",
        "add",
        gives="x, padding, other",
        setup=_FEATURES,
        inputs=6,
        batch="x = torch.randn(2, 5, 6)\npadding = other = torch.zeros(2, 1, 5)",
        bad="padding[0] = 1",
        dtypes=("float16",),
        loss="""
            q = model(x)
            low = torch.finfo(q.dtype).min
            mask = padding.to(q.dtype) * low + other.to(q.dtype) * low  # bad
            out = ((q @ q.transpose(1, 2)) + mask).softmax(-1) @ q
            loss = out.float().square().mean()
        """,
    )


@kind
def empty_nodes(v: Variety) -> Program:
    line = v.one_of(
        "mean = total / count[:, None]  # bad",
        "mean = total.div(count.unsqueeze(-1))  # bad",
        "mean = torch.div(total, count.view(-1, 1))  # bad",
    )
    return v.program(
        "maths",
        "div",
        gives="x, target",
        setup=_FEATURES,
        inputs=6,
        batch="x = torch.randn(8, 6)\ntarget = torch.arange(8) % 4",
        bad="target = target % 3",
        loss=f"""
            h = model(x).float()
            total = torch.zeros(4, 6).index_add(0, target, h)
            count = torch.zeros(4).index_add(0, target, torch.ones(8))
            {line}
            loss = mean.square().mean()
        """,
    )


@kind
def isolated_nodes(v: Variety) -> Program:
    power = v.one_of("degree.pow(-0.5)", "degree ** -0.5", "degree.rsqrt()", "1 / degree.sqrt()")
    return v.program(
        "maths",
        "pow rsqrt reciprocal mul",
        gives="x, adjacency",
        setup=_FEATURES,
        inputs=6,
        batch="x = torch.randn(4, 6)\nadjacency = torch.ones(4, 4)",
        bad="adjacency[1] = 0\nadjacency[:, 1] = 0",
        dtypes=(None, "bfloat16"),
        loss=f"""
            degree = adjacency.sum(-1)
            scale = {power}  # bad
            h = (scale[:, None] * adjacency * scale) @ model(x)
            loss = h.float().square().mean()
        """,
    )


@kind
def gradient_penalty(v: Variety) -> Program:
    norm = v.one_of("g.square().sum(-1).sqrt()", "torch.sqrt((g ** 2).sum(1))")
    return v.program(
        "maths",
        "sqrt",
        gives="x, keep",
        setup="""
            model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
            with torch.no_grad():
                model[0].bias.fill_(0.1)
        """,
        inputs=4,
        batch="keep = torch.ones(x.shape[0], 1)",
        bad="keep[0] = 0",
        dtypes=(None,),
        loss=f"""
            z = x.clone().requires_grad_()
            g, = torch.autograd.grad((model(z) * keep).sum(), z, create_graph=True)
            loss = (({norm} - 1) ** 2).mean()  # bad
        """,
    )


@kind
def flow_log_det(v: Variety) -> Program:
    name = v.one_of("scale", "s", "slope")
    return v.program(
        "maths",
        "log",
        number=("gate", "1.0", "0.0"),
        linear=(6, 12),
        loss=f"""
            raw, shift = model(x).float().chunk(2, -1)
            {name} = torch.sigmoid(raw) * gate
            z = x * {name} + shift
            log_det = torch.log({name}).sum(-1)  # bad
            loss = (0.5 * z.square().sum(-1) - log_det).mean()
        """,
    )


@kind
def singular_flow(v: Variety) -> Program:
    call = v.one_of(
        "torch.linalg.slogdet(w)[1]", "torch.logdet(w)", "w.slogdet().logabsdet", "w.det().log()"
    )
    return v.program(
        "maths",
        "_linalg_slogdet log _linalg_det",
        gives="x, keep",
        setup="model = nn.Linear(4, 4)\nnn.init.eye_(model.weight)",
        inputs=4,
        batch="keep = torch.ones(4, 1)",
        bad="keep[2] = 0",
        dtypes=(None,),
        loss=f"""
            w = model.weight * keep
            log_det = {call}  # bad
            loss = model(x).square().mean() - log_det
        """,
    )


@kind
def degenerate_eigenvalues(v: Variety) -> Program:
    call = v.one_of(
        "torch.linalg.eigh(c)[1]", "torch.linalg.svd(c)[0]", "torch.linalg.eigh(c).eigenvectors"
    )
    return v.program(
        "maths",
        "_linalg_eigh _linalg_svd linalg_eigh",
        number=("mix", "1.0", "0.0"),
        linear=(3, 3),
        dtypes=(None,),
        loss=f"""
            h = model(x)
            c = mix * (h.t() @ h) + torch.eye(3)
            loss = {call}[0].pow(3).sum()  # bad
        """,
    )


@kind
def state_space(v: Variety) -> Program:
    return v.program(
        "maths",
        "exp mul",
        number=("gain", "0.1", "300.0"),
        linear=(4, 4),
        dtypes=(None, "bfloat16"),
        loss="""
            a = model(x).float().abs() + 0.5
            decay = torch.exp(gain * a)  # bad
            h = torch.zeros_like(a)
            for _ in range(3):
                h = decay * h + a
            loss = h.mean()
        """,
    )


@kind
def backward_in_python(v: Variety) -> Program:
    return v.program(
        "maths",
        "div reciprocal",
        setup="""
            class Root(torch.autograd.Function):
                @staticmethod
                def forward(ctx, x):
                    y = x.sqrt()
                    ctx.save_for_backward(y)
                    return y

                @staticmethod
                def backward(ctx, gradient):
                    y, = ctx.saved_tensors
                    return gradient / (2 * y)  # bad


            model = nn.Linear(4, 4)
        """,
        inputs=4,
        number=("keep", "1.0", "0.0"),
        dtypes=(None,),
        loss="loss = Root.apply(keep * model(x).square()).mean()",
    )


@kind
def division_in_a_hook(v: Variety) -> Program:
    norm = v.one_of("g.norm()", "g.abs().max()", "g.abs().mean()")
    return v.program(
        "maths",
        "div",
        setup=f"""
            def unit(g):
                return g / {norm}  # bad


            model = nn.Linear(4, 4)
        """,
        inputs=4,
        number=("keep", "1.0", "0.0"),
        dtypes=(None,),
        loss="""
            h = model(x)
            h.register_hook(unit)
            loss = (h * keep).square().mean()
        """,
    )


@kind
def norm_layer_without_eps(v: Variety) -> Program:
    layer = v.one_of(
        "nn.LayerNorm(6, eps=0.0)", "nn.RMSNorm(6, eps=0.0)", "nn.GroupNorm(2, 6, eps=0.0)"
    )
    return v.program(
        "maths",
        "native_layer_norm rsqrt native_group_norm mul _fused_rms_norm",
        number=("keep", "1.0", "0.0"),
        setup=f"model = nn.Sequential(nn.Linear(6, 6), nn.Identity())\nnorm = {layer}",
        inputs=6,
        dtypes=(None,),
        loss="h = norm(model(x) * keep)  # bad\nloss = h.square().mean()",
    )


@kind
def log_of_mixture(v: Variety) -> Program:
    return v.program(
        "maths",
        "log",
        gives="x, y",
        linear=(4, 9),
        batch="y = torch.randn(x.shape[0], 1)",
        bad="y = y + 1e4",
        loss="""
            weight, mean, raw = model(x).float().chunk(3, -1)
            sigma = F.softplus(raw) + 0.1
            density = torch.exp(-0.5 * ((y - mean) / sigma) ** 2) / sigma
            mixture = (weight.softmax(-1) * density).sum(-1)
            loss = -torch.log(mixture).mean()  # bad
        """,
    )
