# expect: output: float16 [2, 4], of line #1: output
# expect: inputs['target']: float32 [2, 4]

class Accelerator:
    def backward(self, loss, **kwargs):
        loss.backward(**kwargs)  #!

class Trainer:
    def __init__(self):
        self.model, self.accelerator = nn.Linear(4, 4).half(), Accelerator()

    def compute_loss(self, inputs):
        output = self.model(inputs["x"])  #1
        return F.huber_loss(output, inputs["target"])

    def training_step(self, inputs):
        loss = self.compute_loss(inputs)
        self.accelerator.backward(loss)

Trainer().training_step({"x": half, "target": x})
