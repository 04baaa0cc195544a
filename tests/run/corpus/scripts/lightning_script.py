# A Lightning module, trained in bf16, and in fp16 with the scaler that Lightning makes.
import sys

import lightning
import torch
from lightning.pytorch.plugins import MixedPrecision


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(8, 1)

    def training_step(self, batch, index):
        (x,) = batch
        y = self.net(x)
        if index == 0:
            ours = sys.modules.get("halfstep._autocast.region")
            print("policy:", ours and ours.current_policy("cpu"), file=sys.stderr)
            print(y.dtype)
        return y.float().square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(**precision):
    lightning.seed_everything(0, verbose=False)
    data = torch.utils.data.TensorDataset(torch.randn(16, 8))
    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **precision,
    )
    model = Model()
    trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=4))
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    print("scaler:", scaler and type(scaler).__module__, file=sys.stderr)
    print(f"{model.net.weight.double().sum().item():.9f}")


fit(precision="bf16-mixed")
fit(plugins=[MixedPrecision("16-mixed", "cpu")])
