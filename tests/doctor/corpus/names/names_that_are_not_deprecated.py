from torch.cuda.amp import common
from torch.amp import GradScaler, autocast

torch.amp.custom_fwd(torch.cuda.amp_mode)
