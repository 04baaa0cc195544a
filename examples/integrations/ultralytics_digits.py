"""ultralytics: its trainer with halfstep's scaler, by one callback.

Task: classify scikit-learn's handwritten digits, written as images to a folder.

Rules to remember:
- `model.add_callback("on_train_start", use_scaler)`: where the trainer has a scaler, it is
  halfstep's from then on. With `amp=False`, in bfloat16 and on a CPU the trainer has none that is
  on, and the callback changes nothing: without a GPU this example trains in float32.
- A scaler with settings is one more line: `partial(use_scaler, scaler=GradScaler(...))`.
- The autocast stands in the trainer's code; a policy for it comes from outside: `use_policy`.

Run: python examples/integrations/ultralytics_digits.py
"""

import argparse
import tempfile
from functools import partial
from pathlib import Path

import torch
from PIL import Image
from sklearn.datasets import load_digits
from ultralytics import YOLO
from ultralytics.engine.trainer import BaseTrainer

from halfstep import GradScaler, use_policy
from halfstep.integrations.ultralytics import use_scaler

device = "cuda" if torch.cuda.is_available() else "cpu"
MODEL = """
nc: 10
backbone:
  - [-1, 1, Conv, [16, 3, 2]]
  - [-1, 1, Conv, [32, 3, 2]]
  - [-1, 1, Conv, [64, 3, 2]]
head:
  - [-1, 1, Classify, [nc]]
"""


def write_images(folder: Path) -> None:
    """Write 800 digits to learn, and 200 to test, into a folder for each class."""
    digits = load_digits()
    for number in range(1000):
        part, kind = "train" if number < 800 else "val", str(digits.target[number])
        (folder / part / kind).mkdir(parents=True, exist_ok=True)
        image = Image.fromarray((digits.images[number] * 15).astype("uint8")).resize((32, 32))
        image.save(folder / part / kind / f"{number}.png")


def tell(trainer: BaseTrainer) -> None:
    scaler = "off" if not trainer.scaler.is_enabled() else trainer.scaler
    print(f"epoch {trainer.epoch + 1}  loss {trainer.tloss['loss'].item():.4f}  scaler {scaler}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    epochs = parser.parse_args().epochs

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_images(folder)
        (folder / "digits-cls.yaml").write_text(MODEL)
        model = YOLO(folder / "digits-cls.yaml")
        scaler = GradScaler(init_scale=1024.0)
        model.add_callback("on_train_start", partial(use_scaler, scaler=scaler))
        model.add_callback("on_train_epoch_end", tell)
        with use_policy("standard"):
            metrics = model.train(
                data=folder, epochs=epochs, imgsz=32, batch=32, nbs=32, device=device,
                optimizer="AdamW", lr0=5e-3, warmup_epochs=0, fliplr=0, auto_augment=None,
                erasing=0, project=folder, name="run", plots=False, verbose=False,
            )  # fmt: skip
    print(f"result: {metrics.top1:.1%} read")


if __name__ == "__main__":
    main()
