# thread: pyg-team/pytorch_geometric 2866
# expect: x_j: float16 [2, 4]
# expect: self.att: float32 [4, 1], a parameter, att of GAT

class MessagePassing(nn.Module):
    def propagate(self, edges, **kwargs):
        return self.aggregate(self.message(kwargs["x"][edges[0]]), edges[1])

    def aggregate(self, inputs, index):
        out = inputs.new_zeros(2, inputs.shape[-1])
        return out.index_add_(0, index, inputs)

class GAT(MessagePassing):
    def __init__(self):
        super().__init__()
        self.lin, self.att = nn.Linear(4, 4).half(), nn.Parameter(torch.randn(4, 1))

    def forward(self, x, edges):
        x = self.lin(x)  #1
        return self.propagate(edges, x=x)

    def message(self, x_j):
        alpha = torch.sigmoid(x_j @ self.att)  #!
        return x_j * alpha

GAT()(half, torch.tensor([[0, 1], [1, 0]]))
