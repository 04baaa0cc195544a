# expect: maths of log_ log2_ reciprocal_ rsqrt_ div_
# $line: p.log_()
# $line: p.log2_()
# $line: p.reciprocal_()
# $line: p.rsqrt_()
# $line: p.div_(p.sum())
# dtypes: none bfloat16
# inputs: 4
# outputs: 4

# --- batch: x, keep
keep = 1.0

# --- bad batch
keep = 0.0

# --- loss
h = model(x).float() * keep
p = h.abs() * 1.0
$line  # bad
loss = p.mean()
