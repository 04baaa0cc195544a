# expect: maths of _ctc_loss
# dtypes: none
# inputs: 5

# --- setup
model = nn.Linear(5, 6)
ctc_loss = nn.CTCLoss(blank=0)

# --- batch: x, y, lengths
x = torch.randn(7, 3, 5)
y = torch.randint(1, 6, (3, 4))
lengths = torch.tensor([4, 2, 3])

# --- bad batch
x = x[:3]

# --- loss
logp = model(x).log_softmax(-1)
loss = ctc_loss(logp, y, torch.full((3,), logp.shape[0]), lengths)  # bad
