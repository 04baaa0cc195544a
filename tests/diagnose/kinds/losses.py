"""Losses that go wrong."""

from __future__ import annotations

from tests.diagnose.kinds.program import Program, Variety, kind


@kind
def bce_by_hand(v: Variety) -> Program:
    p = v.one_of("p", "probs", "pred")
    return v.program(
        "maths",
        "log",
        gives="x, y, gain",
        batch="y = torch.zeros(x.shape[0])\ngain = 1.0",
        bad="gain = 1e4",
        dtypes=(None,),
        loss=f"""
            {p} = torch.sigmoid(model(x) * gain)[:, 0]
            loss = -(y * torch.log({p}) + (1 - y) * torch.log(1 - {p})).mean()  # bad
        """,
    )


@kind
def focal(v: Variety) -> Program:
    gamma = v.one_of("2", "1.5", "0.5")
    return v.program(
        "maths",
        "log",
        number=("gain", "1.0", "1e5"),
        dtypes=(None,),
        loss=f"""
            p = (gain * model(x)).softmax(-1)
            weight = (1 - p.detach()) ** {gamma}
            loss = -(weight * p.log()).sum(-1).mean()  # bad
        """,
    )


@kind
def dice(v: Variety) -> Program:
    dims = v.one_of("", "dim=0", "dim=1")
    return v.program(
        "maths",
        "div",
        gives="x, y",
        batch="y = torch.ones(x.shape[0], 4)",
        bad="y = y * 0",
        outputs=4,
        dtypes=(None, "bfloat16"),
        loss=f"""
            p = torch.relu(model(x) + 1) * y
            overlap = 2 * (p * y).sum({dims})
            loss = 1 - (overlap / (p.sum({dims}) + y.sum({dims}))).mean()  # bad
        """,
    )


@kind
def gaussian_nll(v: Variety) -> Program:
    var = v.one_of("var", "sigma2", "variance")
    return v.program(
        "maths",
        "div log",
        gives="x, y",
        batch="y = torch.randn(x.shape[0], 3)",
        bad="x = x * 0 - 1e3",
        outputs=6,
        setup="model = nn.Linear(5, 6)\nnn.init.ones_(model.weight)",
        inputs=5,
        loss=f"""
            mean, raw = model(x).chunk(2, -1)
            {var} = torch.relu(raw.float() + 20)
            loss = (0.5 * ((y - mean) ** 2 / {var} + {var}.log())).mean()  # bad
        """,
    )


@kind
def ppo_ratio(v: Variety) -> Program:
    clip = v.one_of("0.1", "0.2")
    return v.program(
        "maths",
        "exp",
        gives="x, old, advantage",
        batch="old = torch.randn(x.shape[0])\nadvantage = torch.randn(x.shape[0])",
        bad="old = old - 200",
        loss=f"""
            logp = model(x).float().log_softmax(-1)[:, 0]
            ratio = torch.exp(logp - old)  # bad
            clipped = ratio.clamp(1 - {clip}, 1 + {clip})
            loss = -torch.min(ratio * advantage, clipped * advantage).mean()
        """,
    )


@kind
def sac_log_prob(v: Variety) -> Program:
    action = v.one_of("action", "a", "squashed")
    return v.program(
        "maths",
        "log",
        number=("gain", "1.0", "1e4"),
        dtypes=(None,),
        loss=f"""
            {action} = torch.tanh(gain * model(x))
            logp = -torch.log(1 - {action}.pow(2)).sum(-1)  # bad
            loss = logp.mean()
        """,
    )


@kind
def all_ignored(v: Variety) -> Program:
    line = v.one_of(
        "loss = F.cross_entropy(model(x), y)  # bad",
        "loss = nn.CrossEntropyLoss()(model(x), y)  # bad",
        "loss = F.cross_entropy(model(x), y, label_smoothing=0.1)  # bad",
        "loss = F.nll_loss(model(x).log_softmax(-1), y)  # bad",
    )
    return v.program(
        "maths",
        "nll_loss_forward div",
        gives="x, y",
        batch="y = torch.randint(3, (x.shape[0],))",
        bad="y = torch.full_like(y, -100)",
        outputs=4,
        loss=line,
    )


@kind
def empty_mean(v: Variety) -> Program:
    line = v.one_of(
        "loss = (model(x)[mask] ** 2).mean()  # bad",
        "loss = model(x)[mask].square().mean()  # bad",
        "loss = F.mse_loss(model(x)[mask], torch.zeros(4)[None].expand(int(mask.sum()), 4))  # bad",
        "loss = torch.mean(model(x)[mask].abs())  # bad",
    )
    return v.program(
        "maths",
        "mean mse_loss",
        gives="x, mask",
        batch="mask = torch.ones(x.shape[0], dtype=torch.bool)",
        bad="mask = ~mask",
        outputs=4,
        loss=line,
    )


@kind
def ctc(v: Variety) -> Program:
    blank = v.one_of("", ", blank=0")
    return v.program(
        "maths",
        "_ctc_loss",
        gives="x, y, lengths",
        linear=(5, 6),
        batch="""
            x = torch.randn(7, 3, 5)
            y = torch.randint(1, 6, (3, 4))
            lengths = torch.tensor([4, 2, 3])
        """,
        bad="x = x[:3]",
        dtypes=(None,),
        loss=f"""
            logp = model(x).log_softmax(-1)
            sizes = torch.full((3,), logp.shape[0])
            loss = F.ctc_loss(logp, y, sizes, lengths{blank})  # bad
        """,
    )


@kind
def root_of_zero_distance(v: Variety) -> Program:
    square = v.one_of("((a - b) ** 2).sum(-1)", "(a - b).pow(2).sum(-1)", "(a - b).square().sum(1)")
    return v.program(
        "maths",
        "sqrt",
        gives="x, other",
        batch="other = torch.randn_like(x)",
        bad="other = x.clone()",
        loss=f"""
            a, b = model(x), model(other)
            distance = torch.sqrt({square})  # bad
            loss = torch.relu(distance - 0.5).mean() + distance.mean()
        """,
    )


@kind
def vae_kl(v: Variety) -> Program:
    logvar = v.one_of("logvar", "log_var", "lv")
    return v.program(
        "maths",
        "exp",
        number=("gain", "1.0", "1e5"),
        dtypes=(None, "bfloat16"),
        outputs=8,
        loss=f"""
            mu, {logvar} = model(x).chunk(2, dim=-1)
            {logvar} = {logvar}.abs() * gain
            loss = -0.5 * (1 + {logvar} - mu.pow(2) - {logvar}.exp()).sum(-1).mean()  # bad
        """,
    )


@kind
def info_nce(v: Variety) -> Program:
    return v.program(
        "maths",
        "log",
        number=("tau", "0.5", "1e-4"),
        dtypes=(None,),
        loss="""
            z = F.normalize(model(x), dim=-1)
            e = torch.exp((z @ z.t() - 1) / tau)
            others = e.sum(-1) - e.diagonal()
            loss = -torch.log(others).mean()  # bad
        """,
    )


@kind
def poisson(v: Variety) -> Program:
    full = v.one_of("", ", full=True", ', reduction="sum"')
    return v.program(
        "maths",
        "exp",
        gives="x, y, gain",
        batch="y = torch.ones(x.shape[0])\ngain = 1.0",
        bad="gain = 1e4",
        dtypes=(None,),
        loss=f"""
            rate = gain * model(x)[:, 0].abs()
            loss = F.poisson_nll_loss(rate, y{full})  # bad
        """,
    )


@kind
def poisson_module(v: Variety) -> Program:
    return v.program(
        "maths",
        "exp",
        gives="x, y, gain",
        batch="y = torch.ones(x.shape[0])\ngain = 1.0",
        bad="gain = 1e4",
        setup="model = nn.Linear(4, 1)\ncount_loss = nn.PoissonNLLLoss()",
        inputs=4,
        dtypes=(None,),
        loss="loss = count_loss(gain * model(x)[:, 0].abs(), y)  # bad",
    )


@kind
def tweedie(v: Variety) -> Program:
    power = v.one_of("1.5", "1.7")
    return v.program(
        "maths",
        "pow",
        gives="x, y, keep",
        batch="y = torch.ones(x.shape[0])\nkeep = 1.0",
        bad="keep = 0.0",
        loss=f"""
            mu = keep * model(x).float().abs()[:, 0]
            a = y * torch.pow(mu, 1 - {power}) / (1 - {power})  # bad
            loss = (torch.pow(mu, 2 - {power}) / (2 - {power}) - a).mean()
        """,
    )


@kind
def triplet_by_hand(v: Variety) -> Program:
    return v.program(
        "maths",
        "sqrt",
        gives="x, positive, negative",
        batch="positive, negative = torch.randn_like(x), torch.randn_like(x)",
        bad="positive = x.clone()",
        dtypes=(None, "bfloat16"),
        loss="""
            a, p, n = model(x), model(positive), model(negative)
            near = (a - p).pow(2).sum(1).sqrt()  # bad
            far = (a - n).pow(2).sum(1).sqrt()
            loss = torch.relu(near - far + 9.0).mean()
        """,
    )


@kind
def masked_mean_of_nothing(v: Variety) -> Program:
    line = v.one_of(
        "loss = (error * mask).sum() / mask.sum()  # bad",
        "loss = torch.sum(error * mask) / torch.sum(mask)  # bad",
        "loss = (error * mask).sum() / mask.sum().item()  # bad",
        "loss = (error * mask).sum().div(mask.sum())  # bad",
    )
    return v.program(
        "maths",
        "div",
        gives="x, y, mask",
        batch="y, mask = torch.randn(x.shape[0]), torch.ones(x.shape[0])",
        bad="mask = torch.zeros(x.shape[0])",
        loss=f"error = (model(x)[:, 0].float() - y) ** 2\n{line}",
    )


@kind
def ragged_means(v: Variety) -> Program:
    return v.program(
        "maths",
        "mean",
        gives="x, sizes",
        linear=(4, 2),
        batch="x = torch.randn(9, 4)\nsizes = [2, 4, 3]",
        bad="sizes = [5, 0, 4]",
        loss="""
            parts = [part.mean(0) for part in model(x).float().split(sizes)]  # bad
            loss = torch.stack(parts).square().mean()
        """,
    )


@kind
def kl_of_zero(v: Variety) -> Program:
    return v.program(
        "maths",
        "log",
        gives="x, y",
        batch="y = torch.ones(x.shape[0], 4) / 4",
        bad="y[:, 0] = 0",
        outputs=4,
        dtypes=(None,),
        loss="""
            q = model(x).softmax(-1)
            loss = (y * (torch.log(y) - torch.log(q))).sum(-1).mean()  # bad
        """,
    )


@kind
def masked_target(v: Variety) -> Program:
    smoothing = v.one_of("", ", label_smoothing=0.1")
    return v.program(
        "maths",
        "nll_loss_forward sum mul nll_loss neg masked_fill",
        gives="x, y, allowed",
        batch="""
            y = torch.zeros(x.shape[0], dtype=torch.long)
            allowed = torch.ones(4, dtype=torch.bool)
        """,
        bad="allowed[0] = False",
        outputs=4,
        loss=f"""
            logits = model(x).masked_fill(~allowed, -math.inf)  # bad
            loss = F.cross_entropy(logits, y{smoothing})  # bad
        """,
    )


@kind
def sequence_all_ignored(v: Variety) -> Program:
    index = v.one_of("0", "-100", "3")
    return v.program(
        "maths",
        "nll_loss_forward nll_loss2d_forward nll_loss",
        gives="x, tokens",
        setup="model = nn.Sequential(nn.Embedding(5, 8), nn.Linear(8, 5))",
        batch="x = torch.randint(5, (3, 7))\ntokens = torch.randint(1, 3, (3, 7))",
        bad=f"tokens = torch.full_like(tokens, {index})",
        loss=f"""
            logits = model(x)
            loss = F.cross_entropy(
                logits.flatten(0, 1),
                tokens.flatten(),
                ignore_index={index},
            )
        """.replace("F.cross_entropy(", "F.cross_entropy(  # bad"),
    )


@kind
def ctc_module(v: Variety) -> Program:
    return v.program(
        "maths",
        "_ctc_loss",
        gives="x, y, lengths",
        setup="model = nn.Linear(5, 6)\nctc_loss = nn.CTCLoss(blank=0)",
        inputs=5,
        batch="""
            x = torch.randn(7, 3, 5)
            y = torch.randint(1, 6, (3, 4))
            lengths = torch.tensor([4, 2, 3])
        """,
        bad="x = x[:3]",
        dtypes=(None,),
        loss="""
            logp = model(x).log_softmax(-1)
            loss = ctc_loss(logp, y, torch.full((3,), logp.shape[0]), lengths)  # bad
        """,
    )
