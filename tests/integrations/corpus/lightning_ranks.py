# Usage: lightning_ranks.py STRATEGY: two ranks, one with a bad batch.
import sys

import lightning
import torch

from halfstep import GradScaler
from halfstep.integrations.lightning import HalfstepPrecision


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(8, 1)

    def training_step(self, batch, index):
        (x,) = batch
        if index == 2 and self.global_rank == 1:
            x = x / 0
        return self.net(x).float().square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


if __name__ == "__main__":
    torch.manual_seed(0)
    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        devices=2,
        strategy=sys.argv[1],
        plugins=[HalfstepPrecision(scaler=GradScaler(init_scale=1024.0))],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    data = torch.utils.data.TensorDataset(torch.randn(32, 8))
    trainer.fit(Module(), torch.utils.data.DataLoader(data, batch_size=4))
