# expect: maths of native_layer_norm rsqrt native_group_norm mul _fused_rms_norm
# $layer: nn.LayerNorm(6, eps=0.0)
# $layer: nn.RMSNorm(6, eps=0.0)
# $layer: nn.GroupNorm(2, 6, eps=0.0)
# dtypes: none
# inputs: 6

# --- setup
model = nn.Sequential(nn.Linear(6, 6), nn.Identity())
norm = $layer

# --- batch: x, keep
keep = 1.0

# --- bad batch
keep = 0.0

# --- loss
h = norm(model(x) * keep)  # bad
loss = h.square().mean()
