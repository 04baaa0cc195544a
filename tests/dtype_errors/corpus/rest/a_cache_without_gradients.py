# expect: tried, and it runs, in place of 

class Layer(nn.Module):
    def __init__(self, w):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(w, w) for _ in range(4))

    def forward(self, x, cache):
        k, v = self.k(x), self.v(x)
        if cache is not None:
            k, v = torch.cat([cache["k"], k], 1), torch.cat([cache["v"], v], 1)
        new = {"k": k, "v": v}
        return self.o(F.scaled_dot_product_attention(self.q(x), k, v)), new  #!

layers = nn.ModuleList(Layer(8) for _ in range(2)).half()
emb, head = nn.Embedding(12, 8).half(), nn.Linear(8, 12).half()
caches = [{"k": torch.zeros(2, 1, 8), "v": torch.zeros(2, 1, 8)} for _ in layers]
ids = torch.zeros(2, 1, dtype=torch.long)
with torch.inference_mode():
    for t in range(5):
        h = emb(ids)
        for i, layer in enumerate(layers):
            h, caches[i] = layer(h, caches[i])
        ids = head(h).argmax(-1)
print("END", ids.flatten().tolist())
