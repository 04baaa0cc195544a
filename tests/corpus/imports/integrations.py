# What integrations use.
import tempfile
import accelerate
import transformers
from halfstep.integrations.accelerate import use_scaler
from halfstep.integrations.lightning import HalfstepPrecision

HalfstepPrecision(policy="standard")
use_scaler(accelerate.Accelerator(mixed_precision="fp16", cpu=True))
