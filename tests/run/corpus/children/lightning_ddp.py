# Lightning starts this script a second time for the other rank.
import lightning
import torch


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 1)

    def training_step(self, batch, index):
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


if __name__ == "__main__":
    lightning.seed_everything(0)
    data = torch.utils.data.TensorDataset(torch.ones(16, 4))
    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )
    model = Model()
    trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=2))
