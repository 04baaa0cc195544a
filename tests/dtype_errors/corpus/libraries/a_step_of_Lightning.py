# expect: h: float16 [2, 4], of line #1
# expect: head.weight of Module: float32 [2, 4]

import logging
import warnings
warnings.simplefilter("ignore")
import lightning as L
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.backbone, self.head = nn.Linear(4, 4).half(), nn.Linear(4, 2)

    def training_step(self, batch, index):
        h = self.backbone(batch.half())  #1
        return self.head(h).sum()  #!

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

trainer = L.Trainer(
    max_steps=1, accelerator="cpu", logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False,
)
trainer.fit(Module(), torch.utils.data.DataLoader(x, batch_size=2))
