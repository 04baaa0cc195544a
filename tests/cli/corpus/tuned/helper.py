# What the script imports from beside it.
from torch import nn

class Overflows(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 1e6 / 1e6
