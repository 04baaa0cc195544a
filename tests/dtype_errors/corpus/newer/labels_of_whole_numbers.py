# thread: PacktPublishing/Mastering-PyTorch 4
# expect: labels: int64 [2, 3], of line #2
# expect: logits: float32 [2, 3], of line #1

class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.score, self.loss = nn.Linear(4, 3), nn.BCEWithLogitsLoss()

    def forward(self, x, labels=None):
        logits = self.score(x)  #1
        if labels is not None:
            return self.loss(logits, labels)  #!
        return logits

labels = torch.tensor([[1, 0, 0], [0, 1, 1]])  #2
Classifier()(x, labels=labels)
