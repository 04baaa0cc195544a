# expect: features: float32 [1, 4, 2], of line #1: batch = {
# expect: conv1.weight of Whisper: float16

class Whisper(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv1d(4, 2, 1)

    def generate(self, input_features=None, **kwargs):
        return self.encode(input_features, **kwargs)

    def encode(self, features, **kwargs):
        return F.gelu(self.conv1(features))  #!

def transcribe(model, audio):
    batch = {"input_features": audio[None].transpose(1, 2)}  #1
    return model.generate(**batch)

transcribe(Whisper().half(), x)
