# thread: espnet/espnet 1777
# expect: log_probs: float16 [2, 1, 5], of line #1: log_probs = self.head

class Recognizer(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 5)
        self.loss = nn.CTCLoss(zero_infinity=True)

    def forward(self, feats, labels, lengths):
        log_probs = self.head(feats).log_softmax(-1)[:, None]  #1
        return self.loss(log_probs, labels, lengths, torch.tensor([1]))  #!

Recognizer().half()(half, torch.tensor([[1]]), torch.tensor([2]))
