# expect: float32 [6], of line
# cure: .long())

class Rating(nn.Module):
    def __init__(self):
        super().__init__()
        self.users, self.films = nn.Embedding(10, 4), nn.Embedding(20, 4)

    def forward(self, table):
        user, film = table[:, 0], table[:, 1]
        a = self.users(user)  #!
        return (a * self.films(film)).sum(1)


table = torch.tensor([[1.0, 3.0, 5.0], [2.0, 7.0, 1.0]]).repeat(3, 1)
model = Rating()
for _ in range(2):
    F.mse_loss(model(table), table[:, 2]).backward()
