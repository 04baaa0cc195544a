# expect: project(image): float32 [2, 6]
# cure: h.masked_scatter((ids == 29).unsqueeze(-1), project(image).to(torch.bfloat16))

embed, project, head = nn.Embedding(30, 6).bfloat16(), nn.Linear(3, 6), nn.Linear(6, 2).bfloat16()
ids = torch.randint(0, 20, (2, 5))
ids[:, 1] = 29
image = torch.randn(2, 3)
h = embed(ids)
h = h.masked_scatter((ids == 29).unsqueeze(-1), project(image))  #!
head(h)
