# expect: maths of bmm mm matmul
# $call: torch.einsum("bd,cd->bc", q, q)
# $call: torch.matmul(q, q.t())
# $call: q.mm(q.t())
# dtypes: none
# inputs: 4

# --- setup
model = nn.Linear(4, 4)

# --- batch: x, gain
gain = 1.0

# --- bad batch
gain = 1e25

# --- loss
q = gain * model(x)
loss = $call.mean()  # bad
