# thread: NVIDIA/apex 1052
# expect: scores: float16 [2, 4], of line #1
# expect: 65,504

class Attention(nn.Module):
    def forward(self, scores, mask):
        scores = scores.masked_fill(~mask.unsqueeze(-1), -1e9)  #!
        return scores.softmax(-1)

with torch.autocast("cpu", torch.float16):
    scores = nn.Linear(4, 4)(x)  #1
    Attention()(scores, torch.tensor([True, False]))
