# Models in bfloat16 with Lightning. With "hand", halfstep is called as its guide says.
import sys

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset


class Model(lightning.LightningModule):
    def __init__(self, is_manual):
        super().__init__()
        self.automatic_optimization = not is_manual
        self.net = torch.nn.Sequential(
            torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 8)
        )

    def training_step(self, batch, index):
        loss = self.net(batch[0].bfloat16()).float().square().sum()
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, gradient_clip_val=0.5)
            optimizer.step()
            self.lr_schedulers().step()
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=1e-4, momentum=0.9)
        if "hand" in sys.argv:
            import halfstep

            halfstep.guard(halfstep.master_weights(optimizer), max_norm=1.0)
        return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)]


def fit(is_manual=False, is_cast=False, bad=None, **options):
    lightning.seed_everything(0, verbose=False)
    model = Model(is_manual)
    if is_cast:
        model.to(torch.bfloat16)
    trainer = lightning.Trainer(
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    x = torch.randn(32, 16)
    if bad is not None:
        x[4 * bad] = torch.nan
    trainer.fit(model, DataLoader(TensorDataset(x), batch_size=4))
    print(sum(param.double().sum().item() for param in model.parameters()))


fit(precision="bf16-true")
fit(precision="bf16-true", gradient_clip_val=0.5, accumulate_grad_batches=3)
fit(precision="bf16-true", is_manual=True)
fit(is_cast=True, gradient_clip_val=0.05, gradient_clip_algorithm="value")
fit(precision="bf16-true", gradient_clip_val=0.5, bad=3)
