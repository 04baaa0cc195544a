"""More programs that fail with errors about dtypes; a comment names the thread behind one."""

from tests.dtype_errors.dtype_programs import Hostile

PROGRAMS = {
    # After public threads.
    # pytorch/pytorch 45048
    "a cell of a recurrent layer": Hostile(
        """
class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.LSTMCell(4, 3)

    def forward(self, frames):
        state = torch.zeros(2, 3), torch.zeros(2, 3)  #1
        for frame in frames:  #2
            state = self.cell(frame, state)  #!
        return state[0]

frames = x.half()[None]
Decoder()(frames)
""",
        ("frame: float16 [2, 4], of line #2: for f", "cell.weight_ih of Decoder: float32 [12, 4]"),
    ),
    # pytorch/pytorch 42218
    "a flow in float32": Hostile(
        """
class Warp(nn.Module):
    def forward(self, image, flow):
        grid = self.base(flow) + flow.permute(0, 2, 3, 1)  #2
        return F.grid_sample(image, grid, align_corners=False)  #!

    def base(self, flow):
        theta = torch.eye(2, 3)[None]
        return F.affine_grid(theta, [1, 1, 4, 4], align_corners=False)

image = nn.Conv2d(1, 1, 1).half()(torch.rand(1, 1, 4, 4).half())  #1
Warp()(image, torch.zeros(1, 2, 4, 4))
""",
        ("image: float16 [1, 1, 4, 4], of line #1", "grid: float32 [1, 4, 4, 2], of line #2"),
    ),
    # lucidrains/ema-pytorch 36
    "an average of a library": Hostile(
        """
from ema_pytorch import EMA

model = nn.Linear(4, 2)
ema = EMA(model, beta=0.9, update_after_step=0, update_every=1)
ema.update()
model.bfloat16()
ema.update()  #!
""",
        ("tgt: float32 [2, 4], a parameter, ema_model.weight", "src: bfloat16 [2, 4], a parameter"),
        is_curable=False,
    ),
    # zichongli5/NorMuon 7
    "a second moment in float32": Hostile(
        """
class Muon(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["second"] = torch.zeros(p.shape[0], 1)
                update = p.grad
                second = state["second"]
                v_mean = update.square().mean(dim=-1, keepdim=True)  #1
                second.lerp_(v_mean, 1 - group["beta2"])  #!
                p.sub_(update / second.sqrt())

model = nn.Linear(4, 2, bias=False).bfloat16()
optimizer = Muon(model.parameters(), {"beta2": 0.9})
model(x.bfloat16()).sum().backward()
optimizer.step()
""",
        ("second: float32 [2, 1]", "v_mean: bfloat16 [2, 1], of line #1"),
    ),
    # cvg/glue-factory 76
    "a scattered mean": Hostile(
        """
class Lines(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = nn.Linear(4, 4)

    def forward(self, desc, junctions):
        lines = self.mlp(desc)  #1
        update = torch.zeros_like(desc)  #2
        index = junctions[:, None].repeat(1, 4)
        update = update.scatter_reduce_(  #!
            dim=0,
            index=index,
            src=lines,
            reduce="mean",
            include_self=False,
        )
        return desc + update

with torch.autocast("cpu", torch.bfloat16):
    Lines()(x, torch.tensor([0, 1]))
""",
        ("update: float32 [2, 4], of line #2", "lines: bfloat16 [2, 4], of line #1"),
    ),
    # flairNLP/flair 3651
    "a mask that is added": Hostile(
        """
class Embeddings(nn.Module):
    def lengths(self, hidden, word_ids):
        mask = (word_ids >= 0).float()  #2
        counts = torch.zeros(2, 3, dtype=hidden.dtype)  #1
        counts.scatter_add_(1, word_ids.clamp(min=0), mask)  #!
        return counts

Embeddings().lengths(half, torch.tensor([[0, 1], [1, -1]]))
""",
        ("counts: float16 [2, 3], of line #1", "mask: float32 [2, 2], of line #2"),
    ),
    # meta-pytorch/torchtune 1349
    "a cache of keys": Hostile(
        """
class Cache(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.register_buffer("k", torch.zeros(1, 1, 8, 4, dtype=dtype), persistent=False)

    def update(self, pos, k_val):
        k_out = self.k
        k_out[:, :, pos] = k_val  #!
        return k_out

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.wk, self.cache = nn.Linear(4, 4), Cache(torch.bfloat16)

    def forward(self, x, pos):
        k = self.wk(x)[None, None]  #1
        return self.cache.update(pos, k)

Attention()(x, torch.tensor([0, 1]))
""",
        (
            "k_out: bfloat16 [1, 1, 8, 4], a buffer, cache.k of A",
            "k_val: float32 [1, 1, 2, 4], of line #1",
        ),
    ),
    # meta-pytorch/torchtune 398
    "a cache with a default dtype": Hostile(
        """
class Cache:
    def __init__(self, dtype=torch.float32):
        self.k = torch.zeros(1, 1, 2, 4, dtype=dtype)  #1
        self.v = torch.zeros(1, 1, 2, 4, dtype=dtype)  #2

    def update(self, k, v):
        self.k[:, :, :1] = k
        self.v[:, :, :1] = v
        return self.k, self.v

cache = Cache()  #5
q = torch.randn(1, 1, 1, 4, dtype=torch.bfloat16)  #3
k, v = cache.update(q, q)  #4
out = F.scaled_dot_product_attention(q, k, v)  #!
""",
        ("q: bfloat16 [1, 1, 1, 4], of line #3", "k: float32 [1, 1, 2, 4], of line #5: cache ="),
    ),
    # NVIDIA/apex 1052
    "a mask that does not fit": Hostile(
        """
class Attention(nn.Module):
    def forward(self, scores, mask):
        scores = scores.masked_fill(~mask.unsqueeze(-1), -1e9)  #!
        return scores.softmax(-1)

with torch.autocast("cpu", torch.float16):
    scores = nn.Linear(4, 4)(x)  #1
    Attention()(scores, torch.tensor([True, False]))
""",
        ("scores: float16 [2, 4], of line #1", "65,504"),
    ),
    # nari-labs/dia 45
    "keys that were computed before": Hostile(
        """
class State:
    def __init__(self, enc, proj):
        self.k = proj(enc)[None, None].float()  #2
        self.v = self.k * 2

class CrossAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj = nn.Linear(4, 4).bfloat16()

    def forward(self, Xq, cache=None):
        q = self.q_proj(Xq).view(1, 1, 2, 4)  #1
        if cache is not None:
            attn_k, attn_v = cache.k, cache.v
        return F.scaled_dot_product_attention(q, attn_k, attn_v, scale=1.0)  #!

attention = CrossAttention()
attention(x.bfloat16(), State(x.bfloat16(), attention.q_proj))
""",
        ("q: bfloat16 [1, 1, 2, 4], of line #1", "attn_k: float32 [1, 1, 2, 4], of line #2"),
    ),
    # HomebrewML/HeavyBall 57
    "an orthogonal basis in bfloat16": Hostile(
        """
def orthogonalize(gg, basis):
    estimate = torch.einsum("ij,ij->j", basis, gg @ basis)
    order = torch.argsort(estimate, descending=True)
    basis = basis[:, order]  #1
    power = gg @ basis  #2
    basis, _ = torch.linalg.qr(power)  #!
    return basis

grad = torch.randn(4, 4).bfloat16()
orthogonalize(grad @ grad.T, torch.eye(4).bfloat16())
""",
        ("power: bfloat16 [4, 4], of line #2: power = gg @ basis",),
    ),
    # pytorch/pytorch 117844
    "a transform of features": Hostile(
        """
class Spectral(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv1d(2, 2, 1), nn.LayerNorm(4)

    def forward(self, x):
        h = self.conv(x)  #1
        spectrum = torch.fft.rfft(h, dim=-1, norm="ortho")  #!
        return torch.fft.irfft(spectrum, dim=-1)

Spectral().bfloat16()(x[None].bfloat16())
""",
        ("h: bfloat16 [1, 2, 4], of line #1: h = self.conv(x)",),
    ),
    # espnet/espnet 1777
    "a CTC loss": Hostile(
        """
class Recognizer(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 5)
        self.loss = nn.CTCLoss(zero_infinity=True)

    def forward(self, feats, labels, lengths):
        log_probs = self.head(feats).log_softmax(-1)[:, None]  #1
        return self.loss(log_probs, labels, lengths, torch.tensor([1]))  #!

Recognizer().half()(half, torch.tensor([[1]]), torch.tensor([2]))
""",
        ("log_probs: float16 [2, 1, 5], of line #1: log_probs = self.head",),
    ),
    # Nerogar/OneTrainer 655
    "a norm of another low precision": Hostile(
        """
class Resampler(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(4), nn.LayerNorm(4)

    def forward(self, image, latents):
        image = self.norm1(image.float())
        latents = self.norm2(latents)  #!
        return image + latents

encoder = Resampler()
encoder.norm2.to(torch.bfloat16)
latents = nn.Parameter(half)  #1
encoder(x, latents)
""",
        (
            "latents: float16",
            "of line #1: latents = nn.Par",
            "norm2.weight of Resampler: bfloat16 [4]",
        ),
    ),
    # zai-org/CogVideo 170
    "a layer of T5 in float32": Hostile(
        """
class Dense(nn.Module):
    def __init__(self):
        super().__init__()
        self.wi, self.wo = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, hidden):
        hidden = self.wi(hidden).relu()
        if hidden.dtype != self.wo.weight.dtype:
            hidden = hidden.to(self.wo.weight.dtype)
        return self.wo(hidden)

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.dense = nn.LayerNorm(4), Dense()

    def forward(self, hidden):
        return hidden + self.dense(self.norm(hidden))  #!

encoder = nn.Sequential(Block(), Block()).half()
for block in encoder:
    block.dense.wo.float()
encoder(half)
""",
        ("hidden: float32 [2, 4]", "1.norm.weight of Sequential: float16 [4]"),
    ),
    # huggingface/transformers 37068
    "the queries of a bridge": Hostile(
        """
class QFormer(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, query_embeds):
        embedding = self.norm(query_embeds.to(self.norm.weight.dtype))
        return self.query(query_embeds) + embedding  #!

class Blip(nn.Module):
    def __init__(self):
        super().__init__()
        self.query_tokens = nn.Parameter(torch.zeros(1, 2, 4))
        self.qformer = QFormer().half()

    def forward(self, image):
        tokens = self.query_tokens.expand(len(image), -1, -1)  #1
        return self.qformer(query_embeds=tokens)

Blip()(half)
""",
        ("query_embeds: float32 [2, 2, 4], of line #1: tokens", "qformer.query.weight of Blip: fl"),
    ),
    # unslothai/unsloth 212
    "a fast LoRA in backward": Hostile(
        """
class FastLora(torch.autograd.Function):
    @staticmethod
    def forward(ctx, X, A, B):
        ctx.save_for_backward(X, A, B)
        return X @ A.to(X.dtype) @ B.to(X.dtype)

    @staticmethod
    def backward(ctx, dY):
        X, A, B = ctx.saved_tensors
        h = X.view(-1, X.shape[-1])
        d_A = h.t() @ (dY @ B.t())  #!
        return None, d_A, None

A, B = nn.Parameter(torch.randn(4, 1)), torch.randn(1, 4)  #1
y = checkpoint(FastLora.apply, half, A, B, use_reentrant=False)
y.sum().backward()
""",
        ("dY: float16 [2, 4]", "B.t(): float32 [4, 1]"),
    ),
    # pyg-team/pytorch_geometric 2866
    "a graph in half precision": Hostile(
        """
class MessagePassing(nn.Module):
    def propagate(self, edges, **kwargs):
        return self.aggregate(self.message(kwargs["x"][edges[0]]), edges[1])

    def aggregate(self, inputs, index):
        out = inputs.new_zeros(2, inputs.shape[-1])
        return out.index_add_(0, index, inputs)

class GAT(MessagePassing):
    def __init__(self):
        super().__init__()
        self.lin, self.att = nn.Linear(4, 4).half(), nn.Parameter(torch.randn(4, 1))

    def forward(self, x, edges):
        x = self.lin(x)  #1
        return self.propagate(edges, x=x)

    def message(self, x_j):
        alpha = torch.sigmoid(x_j @ self.att)  #!
        return x_j * alpha

GAT()(half, torch.tensor([[0, 1], [1, 0]]))
""",
        ("x_j: float16 [2, 4]", "self.att: float32 [4, 1], a parameter, att of GAT"),
    ),
    # Lightning-AI/pytorch-lightning 16303
    "a gradient of another dtype": Hostile(
        """
model = nn.Linear(4, 2).half()
masters = [p.detach().clone().float().requires_grad_() for p in model.parameters()]
model(half).sum().backward()
for p, master in zip(model.parameters(), masters):
    master.grad = p.grad.detach()  #!
""",
        ("master: float32 [2, 4]", "p.grad.detach(): float16 [2, 4]"),
    ),
    # mymusise/ChatGLM-Tuning 179
    "norms in float32 for stability": Hostile(
        """
class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.input_layernorm = nn.LayerNorm(4)
        self.query_key_value = nn.Linear(4, 12)

    def forward(self, hidden):
        return self.query_key_value(self.input_layernorm(hidden))  #!

def prepare(model):
    for name, p in model.named_parameters():
        if p.ndim == 1 and "layernorm" in name:
            p.data = p.data.float()
    return model

model = prepare(nn.ModuleList([Layer(), Layer()]).half())
hidden = half.requires_grad_()
for layer in model:
    hidden = checkpoint(layer, hidden.float(), use_reentrant=True)[..., :4]
""",
        ("self.input_layernorm(hidden): float32 [2, 4]", "0.query_key_value.weight of Mod"),
    ),
    # yifan123/flow_grpo 147
    "latents of a scheduler": Hostile(
        """
class Scheduler:
    def step(self, noise, t, sample):
        sample = sample.to(torch.float32)
        prev = sample - 0.1 * noise
        return (prev,)

class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv_in = nn.Conv2d(4, 4, 1)

    def forward(self, hidden_states, timestep):
        hidden_states = self.conv_in(hidden_states)  #!
        return (hidden_states * timestep,)

transformer, scheduler = Denoiser().half(), Scheduler()
latents = torch.randn(1, 4, 2, 2).half()
with torch.no_grad():
    for t in (1, 2):
        latent_model_input = torch.cat([latents] * 2)  #1
        noise = transformer(hidden_states=latent_model_input, timestep=t)[0]
        noise, text = noise.chunk(2)
        latents = scheduler.step(noise, t, latents)[0]
""",
        ("hidden_states: float32 [2, 4, 2, 2], of line #1", "conv_in.weight of Denoiser: float16"),
    ),
    # lshqqytiger/stable-diffusion-webui-amdgpu 564
    "a convolution with another forward": Hostile(
        """
originals = nn.Conv2d.forward

def network_forward(self, input):
    return originals(self, input)  #!

nn.Conv2d.forward = network_forward
unet = nn.Sequential(nn.Conv2d(3, 1, 1), nn.SiLU()).half()
noise = torch.randn(1, 3, 2, 2)  #1
try:
    unet(noise)
finally:
    nn.Conv2d.forward = originals
""",
        ("input: float32 [1, 3, 2, 2], of line #1: noise", "0.weight of Sequential: float16"),
    ),
    # nestordemeure/ManifoldMixupV2 1
    "a hook that mixes": Hostile(
        """
class Mixup:
    def __init__(self):
        self.lam = torch.tensor([[0.3], [0.7]])  #1

    def hook(self, module, args, output):
        return torch.lerp(output.flip(0), output, weight=self.lam)  #!

net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).half()
net[0].register_forward_hook(Mixup().hook)
net(half)
""",
        ("output: float16 [2, 4]", "self.lam: float32 [2, 1], of line #1: self.lam"),
    ),
    # zjukg/KoPA 11
    "a prefix of a graph": Hostile(
        """
class Prefix(nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings, self.adapter = nn.Embedding(3, 4), nn.Linear(4, 4)

    def forward(self, ids):
        return self.adapter(self.embeddings(ids))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(8, 4).half()
        self.lm = nn.Linear(4, 8).half()
        self.prefix = Prefix()

    def forward(self, ids, kg):
        prefix = self.prefix(kg)
        embeds = torch.cat((prefix, self.tokens(ids)), dim=0)  #1
        return self.lm(embeds)  #!

Model()(torch.tensor([1]), torch.tensor([0]))
""",
        ("embeds: float32 [2, 4], of line #1: embeds = torch.cat", "lm.weight of Model: float16"),
    ),
    # jenellefeather/model_metamers_pytorch 12
    "text features from a file": Hostile(
        """
import io

buffer = io.BytesIO()
torch.save({"text_features": torch.randn(3, 4)}, buffer)
buffer.seek(0)

def zeroshot(visual, images, weights):
    image_features = visual(images)  #1
    image_features /= image_features.norm(dim=-1, keepdim=True)  #2
    return 100.0 * image_features @ weights  #!

cache = torch.load(buffer)  #3
with torch.no_grad():
    zeroshot(nn.Linear(4, 4).half(), half, cache["text_features"].t())
""",
        (
            "image_features: float16 [2, 4], of line #1: image_f",
            "weights: float32 [4, 3], of line #3",
        ),
    ),
    # mikel-brostrom/boxmot 1820
    "a norm that casts its input": Hostile(
        """
class LayerNorm(nn.LayerNorm):
    def forward(self, x):
        orig_type = x.dtype
        ret = super().forward(x.type(torch.float32))  #!
        return ret.type(orig_type)

vit = nn.Sequential(nn.Linear(4, 4), LayerNorm(4)).half()
vit(half)
""",
        ("x.type(torch.float32): float32 [2, 4]", "1.weight of Sequential: float16 [4]"),
    ),
    "a queue of keys": Hostile(
        """
class MoCo(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(4, 4).half()
        self.register_buffer("queue", torch.randn(4, 6))

    def forward(self, im_q):
        q = self.encoder(im_q)
        q = nn.functional.normalize(q, dim=1)  #1
        l_neg = torch.einsum("nc,ck->nk", [q, self.queue.clone().detach()])  #!
        return l_neg

MoCo()(half)
""",
        ("q: float16 [2, 4], of line #1", "self.queue.clone().detach(): float32 [4, 6]"),
    ),
    "a bias of positions": Hostile(
        """
def build_alibi(mask, heads):
    slopes = torch.tensor([0.5**n for n in range(heads)])
    return (slopes[:, None, None] * mask.cumsum(-1)[None, None, :]).float()

class Attention(nn.Module):
    def forward(self, q, k, alibi):
        return alibi.baddbmm(batch1=q, batch2=k.transpose(1, 2), beta=1.0, alpha=0.5)  #!

q = torch.randn(2, 3, 4).bfloat16()  #1
alibi = build_alibi(torch.ones(3), 2)  #2
Attention()(q, q, alibi)
""",
        ("alibi: float32 [2, 1, 3], of line #2", "q: bfloat16 [2, 3, 4], of line #1"),
    ),
    "a pooled sentence": Hostile(
        """
def mean_pooling(output, attention_mask):
    tokens = output[0]
    mask = attention_mask.float()  #2
    return torch.bmm(mask.unsqueeze(1), tokens).squeeze(1) / mask.sum(1, keepdim=True)  #!

output = (nn.Embedding(8, 4).half()(torch.tensor([[1, 2], [3, 0]])),)  #1
mean_pooling(output, torch.tensor([[1, 1], [1, 0]]))
""",
        ("mask.unsqueeze(1): float32 [2, 1, 2]", "tokens: float16 [2, 2, 4], of line #1"),
    ),
    "a rotary table of complex numbers": Hostile(
        """
def precompute(dim, end):
    freqs = 1.0 / (100.0 ** (torch.arange(0, dim, 2).to(torch.get_default_dtype()) / dim))
    freqs = torch.outer(torch.arange(end).to(freqs.dtype), freqs)  #1
    return torch.polar(torch.ones_like(freqs), freqs)  #!

torch.set_default_dtype(torch.bfloat16)
try:
    precompute(4, 3)
finally:
    torch.set_default_dtype(torch.float32)
""",
        ("freqs: bfloat16 [3, 2], of line #1: freqs = torch.outer",),
    ),
    # xianglin226/scMDC 8
    "arrays of NumPy": Hostile(
        """
import numpy as np
from torch.utils.data import DataLoader, Dataset

class Table(Dataset):
    def __init__(self):
        self.x = np.random.default_rng(0).normal(size=(4, 4))
        self.y = np.arange(4.0)

    def __len__(self):
        return 4

    def __getitem__(self, i):
        return torch.from_numpy(self.x[i]), self.y[i]

model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
for epoch in range(1):
    for inputs, targets in DataLoader(Table(), batch_size=2):  #1
        outputs = model(inputs)  #!
""",
        ("inputs: float64 [2, 4], of line #1", "0.weight of Sequential: float32 [8, 4]"),
    ),
    # locuslab/open-unlearning 156
    "predictions for NumPy": Hostile(
        """
def compute_metrics(logits, labels):
    preds = logits.argmax(-1)
    probs = logits.detach().cpu().numpy()  #!
    return probs

with torch.autocast("cpu", torch.bfloat16):
    logits = nn.Linear(4, 4)(x)  #1
compute_metrics(logits, None)
""",
        ("logits.detach().cpu(): bfloat16 [2, 4]",),
    ),
    # PacktPublishing/Mastering-PyTorch 4
    "labels of whole numbers": Hostile(
        """
class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.score, self.loss = nn.Linear(4, 3), nn.BCEWithLogitsLoss()

    def forward(self, x, labels=None):
        logits = self.score(x)  #1
        if labels is not None:
            return self.loss(logits, labels)  #!
        return logits

labels = torch.tensor([[1, 0, 0], [0, 1, 1]])  #2
Classifier()(x, labels=labels)
""",
        ("labels: int64 [2, 3], of line #2", "logits: float32 [2, 3], of line #1"),
    ),
    # Deci-AI/super-gradients 1073
    "an image of bytes": Hostile(
        """
import numpy as np

def preprocess(image):
    image = image.transpose(2, 0, 1)[None]
    return torch.from_numpy(np.ascontiguousarray(image))

model = nn.Sequential(nn.Conv2d(3, 2, 1), nn.BatchNorm2d(2)).eval()
img = preprocess(np.zeros((4, 4, 3), dtype=np.uint8))  #1
pred = model(img)[0]  #!
""",
        ("img: uint8 [1, 3, 4, 4], of line #1: img = ", "0.weight of Sequential: float32"),
    ),
    "a graph that is compiled": Hostile(
        """
model = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).half()
compiled = torch.compile(model, backend="eager")
y = compiled(x)  #!
""",
        ("x: float32 [2, 4], of line 12", "0.weight of Sequential: float16 [4, 4]"),
    ),
    # pytorch/pytorch 173459
    "weights of attention": Hostile(
        """
class Attention(nn.Module):
    def forward(self, q, k, v):
        attn = q @ k.transpose(-2, -1) / 2
        attn = F.softmax(attn, dim=-1, dtype=torch.float32)  #1
        attn = F.dropout(attn, p=0.1, training=self.training)  #2
        return torch.matmul(attn, v)  #!

q = half[None, None]
Attention()(q, q, q)
""",
        ("attn: float32 [1, 1, 2, 2], of line #2: attn = F.d", "v: float16 [1, 1, 2, 4]"),
    ),
    "a packed sequence": Hostile(
        """
from torch.nn.utils.rnn import pack_padded_sequence

lstm = nn.LSTM(4, 3, batch_first=True)
embedded = nn.Embedding(8, 4).half()(torch.tensor([[1, 2], [3, 0]]))  #1
packed = pack_padded_sequence(embedded, [2, 1], batch_first=True)  #2
output, state = lstm(packed)  #!
""",
        ("float16 [3, 4], of line #2: packed", "weight_ih_l0 of LSTM: float32"),
    ),
    "attention with a padding mask": Hostile(
        """
mha = nn.MultiheadAttention(4, 2, batch_first=True).half()
query = torch.randn(1, 2, 4)  #1
out, _ = mha(query, query, query, key_padding_mask=torch.tensor([[False, True]]))  #!
""",
        ("query: float32 [1, 2, 4], of line #1", "in_proj_weight of MultiheadAttention: float16"),
    ),
    "an encoder layer of PyTorch": Hostile(
        """
class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.register_buffer("pe", torch.zeros(1, 2, 4))

    def forward(self, h):
        h = h + self.pe  #1
        return self.encoder(h)  #!

tagger = Tagger().bfloat16()
tagger.pe = tagger.pe.float()
tagger(x.bfloat16()[None])
""",
        ("h: float32 [1, 2, 4], of line #1: h = h + self.pe", "in_proj_weight of Tagger: bfloat16"),
    ),
    "a module in TorchScript": Hostile(
        """
import warnings
warnings.simplefilter("ignore")
scripted = torch.jit.trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), x)
y = scripted(half)  #!
""",
        ("half: float16 [2, 4], of line 13", "float32 [4, 4]"),
    ),
    "parameters of functional_call": Hostile(
        """
model = nn.Linear(4, 2)
params = {name: p.detach().half() for name, p in model.named_parameters()}  #1
out = torch.func.functional_call(model, params, (x,))  #!
""",
        ("x: float32 [2, 4], of line 12", "float16 [2, 4]", "of line #1"),
    ),
    "two calls of one line": Hostile(
        """
class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4).half()

    def forward(self, x):
        return self.a(x) * torch.sigmoid(self.b(x))  #!

Gate()(x)
""",
        ("x: float32 [2, 4], of line 12", "b.weight of Gate: float16 [4, 4]"),
    ),
    "a hook that casts": Hostile(
        """
def upcast(module, args):
    return tuple(a.float() for a in args)  #1

layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).half()
layers[1].register_forward_pre_hook(upcast)
layers(half)  #!
""",
        ("float32 [2, 4]", "1.weight of Sequential: float16 [4, 4]"),
        is_curable=False,
    ),
    "a weighted bag": Hostile(
        """
bag = nn.EmbeddingBag(8, 4, mode="sum").half()
weights = torch.rand(2, 3)  #1
bag(torch.zeros(2, 3, dtype=torch.long), per_sample_weights=weights)  #!
""",
        ("weights: float32 [2, 3], of line #1", "weight of EmbeddingBag: float16 [8, 4]"),
    ),
    "a quantized weight with a scale": Hostile(
        """
class Int8Linear(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("qweight", torch.ones(2, 4, dtype=torch.int8))
        self.register_buffer("scales", torch.ones(2, 1))

    def forward(self, x):
        w = self.qweight.to(x.dtype) * self.scales  #1
        return F.linear(x, w)  #!

nn.Sequential(Int8Linear())(half)
""",
        ("x: float16 [2, 4], of line 13", "w: float32 [2, 4], of line #1: w = self.qweight"),
    ),
    "a dynamically quantized layer": Hostile(
        """
import warnings
warnings.simplefilter("ignore")
model = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(4, 4)), {nn.Linear})
model(half)  #!
""",
        ("half: float16 [2, 4], of line 13",),
    ),
    "a wrapper of several devices": Hostile(
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.fc = nn.Conv1d(2, 2, 1), nn.Linear(4, 2)

    def forward(self, x):
        x = self.conv(x)
        return self.fc(x.flatten(1).view(-1, 4))  #!

net = nn.DataParallel(Net())
net.module.conv.half()
net(half[None])
""",
        ("x.flatten(1).view(-1, 4): float16 [2, 4]", "fc.weight of", "float32 [2, 4]"),
    ),
    "a product into a buffer": Hostile(
        """
class Pool:
    def __init__(self):
        self.out = torch.empty(2, 2)  #1

    def gram(self, h):
        return torch.mm(h, h.t(), out=self.out)  #!

Pool().gram(half)
""",
        ("h: float16 [2, 4], of line 13", "self.out: float32 [2, 2], of line #1"),
    ),
    "a median of scores": Hostile(
        """
def threshold(scores, q=0.9):
    return torch.quantile(scores.flatten(), q)  #!

with halfstep.autocast("cpu", torch.bfloat16):
    h = nn.Linear(4, 4)(x)  #1
threshold(h)
""",
        ("scores.flatten(): bfloat16 [8]",),
    ),
    "a partial of a loop": Hostile(
        """
from functools import partial, reduce

blocks = [nn.Linear(4, 4).half(), nn.Linear(4, 4)]
run = partial(reduce, lambda h, block: block(h), blocks)  #!
run(half)
""",
        ("h: float16 [2, 4]", "weight of Linear: float32 [4, 4]"),
    ),
    "a tuple that a call unpacks": Hostile(
        """
def encode(ids):
    return nn.Embedding(8, 4)(ids), nn.Linear(4, 4).half()

embedded, proj = encode(torch.tensor([1, 2]))  #1
logits = proj(*[embedded])  #!
""",
        ("embedded: float32 [2, 4], of line #1", "weight of Linear: float16 [4, 4]"),
    ),
    "a sparse adjacency": Hostile(
        """
class GCN(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x, adj):
        support = self.lin(x)  #1
        return torch.sparse.mm(adj, support)  #!

adj = torch.eye(2).to_sparse()  #2
GCN().half()(half, adj)
""",
        ("support: float16 [2, 4], of line #1", "adj: float32 [2, 2], of line #2: adj ="),
    ),
    "a gradient that a hook changes": Hostile(
        """
w = nn.Parameter(torch.randn(4, 4))
h = x @ w
h.register_hook(lambda grad: grad.half())
h.sum().backward()  #!
""",
        ("float32", "float16"),
        is_curable=False,
    ),
    "a property of a module": Hostile(
        """
class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(8, 4).half()

    @property
    def weight(self):
        return self.table.weight

    def forward(self, h):
        return F.linear(input=h, weight=self.weight, bias=None)  #!

Tied()(x)
""",
        ("h: float32 [2, 4], of line 12", "self.weight: float16 [8, 4], a parameter, table.weight"),
    ),
    "a branch in one expression": Hostile(
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj, self.skip = nn.Linear(4, 4).bfloat16(), None

    def forward(self, x):
        h = x if self.skip is None else self.skip(x)  #1
        out = self.proj(h if h.dim() == 2 else h.flatten(1))  #!
        return out

Net()(x)
""",
        ("float32 [2, 4]", "proj.weight of Net: bfloat16 [4, 4]"),
    ),
    "a dictionary of outputs": Hostile(
        """
class Matcher(nn.Module):
    def forward(self, outputs, targets):
        boxes = torch.cat([t["boxes"] for t in targets])  #2
        cost = torch.cdist(outputs["pred_boxes"].flatten(0, 1), boxes, p=1)  #!
        return cost

outputs = {"pred_boxes": nn.Linear(4, 4).half()(half)[None]}  #1
Matcher()(outputs, [{"boxes": torch.rand(1, 4)}, {"boxes": torch.rand(2, 4)}])
""",
        (
            "outputs['pred_boxes'].flatten(0, 1): float16 [2, 4]",
            "boxes: float32 [3, 4], of line #2",
        ),
    ),
}

# With libraries, which take seconds to import.
LIBRARIES = {
    # huggingface/transformers 47805
    "Whisper of transformers": Hostile(
        """
from transformers import WhisperConfig, WhisperForConditionalGeneration

config = WhisperConfig(
    vocab_size=32, d_model=8, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
    decoder_attention_heads=2, encoder_ffn_dim=8, decoder_ffn_dim=8, num_mel_bins=4,
    max_source_positions=4, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    decoder_start_token_id=1,
)
model = WhisperForConditionalGeneration(config).half()
input_features = torch.randn(1, 4, 8)  #1
model(input_features, decoder_input_ids=torch.tensor([[1, 2]]))  #!
""",
        ("input_features: float32 [1, 4, 8]", "encoder.conv1.weight", "of line #1"),
    ),
    # zai-org/CogVLM 282: half latents, a part in float32
    "a VAE of diffusers": Hostile(
        """
from diffusers import AutoencoderKL

vae = AutoencoderKL(block_out_channels=(4,), norm_num_groups=2, latent_channels=4)
latents = torch.randn(1, 4, 4, 4, dtype=torch.float16)  #1
image = vae.decode(latents / vae.config.scaling_factor, return_dict=False)[0]  #!
""",
        ("float16 [1, 4, 4, 4]", "post_quant_conv.weight of AutoencoderKL: float32"),
    ),
    # hpcaitech/ColossalAI 2909
    "a UNet of diffusers": Hostile(
        """
from diffusers import UNet2DModel

unet = UNet2DModel(
    sample_size=8, in_channels=3, out_channels=3, layers_per_block=1, norm_num_groups=2,
    attention_head_dim=2, block_out_channels=(4, 4), down_block_types=("DownBlock2D",) * 2,
    up_block_types=("UpBlock2D",) * 2,
).half()
noisy = torch.randn(1, 3, 8, 8)  #1
noise_pred = unet(noisy, torch.tensor([1])).sample  #!
""",
        ("float32 [1, 3, 8, 8], of line #1: noisy", "conv_in.weight of UNet2DModel: float16"),
    ),
    # hiyouga/LlamaFactory 4432
    "LoRA of peft": Hostile(
        """
from peft import LoraConfig, get_peft_model

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.down(self.up(x).relu())  #!

model = get_peft_model(Net().half(), LoraConfig(r=2, target_modules=["up"]))
y = model(x)
""",
        ("x: float32 [2, 4], of line 12", "base_model.model.up.base_layer.weight of", "float16"),
        is_curable=False,
    ),
    # embeddings-benchmark/mteb 1456
    "embeddings for a Llama": Hostile(
        """
from transformers import LlamaConfig, LlamaForCausalLM

model = LlamaForCausalLM(LlamaConfig(
    vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
    num_attention_heads=2, num_key_value_heads=2,
)).half()
image = torch.randn(1, 2, 8)  #1
embeds = torch.cat([image, model.get_input_embeddings()(torch.tensor([[1, 2]]))], dim=1)  #2
model(inputs_embeds=embeds, attention_mask=torch.ones(1, 4))  #!
""",
        ("float32 [1, 4, 8]", "q_proj.weight of LlamaForCausalLM: float16", "of line #2"),
    ),
    # zai-org/GLM-4 693
    "the loss of a Trainer": Hostile(
        """
import tempfile
from transformers import GPT2Config, GPT2Model, Trainer, TrainingArguments

class Reward(Trainer):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.head = nn.Linear(8, 1)

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        hidden = model(input_ids=inputs["input_ids"]).last_hidden_state  #1
        return self.head(hidden[:, -1]).mean()  #!

model = GPT2Model(GPT2Config(vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=2)).half()
data = [{"input_ids": torch.tensor([1, 2])}] * 2
arguments = TrainingArguments(
    tempfile.mkdtemp(), report_to="none", use_cpu=True, max_steps=1, disable_tqdm=True,
    remove_unused_columns=False,
)
Reward(model=model, args=arguments, train_dataset=data).train()
""",
        ("hidden[:, -1]: float16 [2, 8]", "weight of Linear: float32 [1, 8]"),
    ),
    "a step of Lightning": Hostile(
        """
import logging
import warnings
warnings.simplefilter("ignore")
import lightning as L
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.backbone, self.head = nn.Linear(4, 4).half(), nn.Linear(4, 2)

    def training_step(self, batch, index):
        h = self.backbone(batch.half())  #1
        return self.head(h).sum()  #!

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

trainer = L.Trainer(
    max_steps=1, accelerator="cpu", logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False,
)
trainer.fit(Module(), torch.utils.data.DataLoader(x, batch_size=2))
""",
        ("h: float16 [2, 4], of line #1", "head.weight of Module: float32 [2, 4]"),
    ),
}

# What is not said, or not cured, yet.
MISSES = {
    "keys that were computed before": "the line that computed them",
    "a module in TorchScript": "the weight, and a cure",
    "parameters of functional_call": "a cure",
    "a product into a buffer": "a cure",
    "a partial of a loop": "a cast to the dtype of each block",
    "a gradient that a hook changes": "anything",
    "embeddings for a Llama": "the origin",
}
