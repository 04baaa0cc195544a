# expect: self of HuberLoss: float16 [2, 4]
# expect: target of HuberLoss: float32 [2, 4]
# expect: of line #1: loss = s
# incurable

class Accelerator:
    def backward(self, loss, **kwargs):
        loss.backward(**kwargs)  #!

class Trainer:
    def __init__(self):
        self.model, self.accelerator = nn.Linear(4, 4).half(), Accelerator()

    def compute_loss(self, inputs):
        output = self.model(inputs["x"])
        return F.huber_loss(output, inputs["target"])

    def training_step(self, inputs):
        loss = self.compute_loss(inputs)  #1
        self.accelerator.backward(loss)

Trainer().training_step({"x": half, "target": x})
