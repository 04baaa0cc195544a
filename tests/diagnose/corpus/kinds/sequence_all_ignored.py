# expect: maths of nll_loss_forward nll_loss2d_forward nll_loss
# $index: 0
# $index: -100
# $index: 3

# --- setup
model = nn.Sequential(nn.Embedding(5, 8), nn.Linear(8, 5))

# --- batch: x, tokens
x = torch.randint(5, (3, 7))
tokens = torch.randint(1, 3, (3, 7))

# --- bad batch
tokens = torch.full_like(tokens, $index)

# --- loss
logits = model(x)
loss = F.cross_entropy(  # bad
    logits.flatten(0, 1),
    tokens.flatten(),
    ignore_index=$index,
)
