# expect: maths of log
# $line: loss = F.gaussian_nll_loss(h, h.abs().log().exp(), h.abs() + 1)  # bad
# $line: loss = torch.stack([part.abs().log() for part in h]).mean()  # bad
# $line: loss = sum(torch.log(part.abs()).mean() for part in h)  # bad
# $line: loss = torch.cat([h.abs().log(), h], dim=-1).mean()  # bad
# dtypes: none bfloat16
# inputs: 4
# outputs: 4

# --- batch: x, keep
keep = 1.0

# --- bad batch
keep = 0.0

# --- loss
h = model(x).float() * keep
$line
