# thread: pytorch/pytorch 45048
# expect: frame: float16 [2, 4], of line #2: for f
# expect: cell.weight_ih of Decoder: float32 [12, 4]

class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.LSTMCell(4, 3)

    def forward(self, frames):
        state = torch.zeros(2, 3), torch.zeros(2, 3)  #1
        for frame in frames:  #2
            state = self.cell(frame, state)  #!
        return state[0]

frames = x.half()[None]
Decoder()(frames)
