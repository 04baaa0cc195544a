# expect: support: float16 [2, 4], of line #1
# expect: adj: float32 [2, 2], of line #2: adj =

class GCN(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x, adj):
        support = self.lin(x)  #1
        return torch.sparse.mm(adj, support)  #!

adj = torch.eye(2).to_sparse()  #2
GCN().half()(half, adj)
