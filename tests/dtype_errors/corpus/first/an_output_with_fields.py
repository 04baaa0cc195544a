# expect: outputs.last_hidden_state: float16
# expect: of line #1: outputs =
# expect: score.weight of Classif

from dataclasses import dataclass

@dataclass
class Output:
    last_hidden_state: torch.Tensor
    logits: torch.Tensor | None = None

class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone, self.score = nn.Linear(4, 4).half(), nn.Linear(4, 2)

    def encode(self, ids):
        return Output(last_hidden_state=self.backbone(ids))

    def forward(self, ids):
        outputs = self.encode(ids)  #1
        return Output(outputs.last_hidden_state, self.score(outputs.last_hidden_state))  #!

Classifier()(half)
