# expect: maths of acos asin
# $name: acos
# $name: asin
# dtypes: none
# outputs: 4

# --- batch: x, sign
sign = torch.tensor([1.0, -1.0])

# --- bad batch
sign = torch.ones(2)

# --- loss
a = model(x).sum(-1, keepdim=True) + torch.tensor([9.0, 9.0])
b = a.detach() * sign
cosine = (a / a.detach().abs() * b / b.detach().abs()).mean(-1)
loss = torch.$name(cosine).mean()  # bad
