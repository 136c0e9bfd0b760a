"""The demo's network: two convolutions, a layer norm over channels at each position, and a small head."""

from __future__ import annotations

import torch
from torch import nn


class DigitNet(nn.Module):
    """Classifies 8 by 8 digits: (B, 1, 8, 8) to (B, 10).

    With ``faulty``, the code holds these mistakes, each of which trains and evaluates without an error:

    1. the convolutions keep biases that the batch norms behind them remove;
    2. ``momentum=0.99`` was copied from Keras, where it means a decay, so the running statistics are nearly those of
       the last batch;
    3. the layer norm runs over the 16 positions of each channel, not over the channels at each position;
    4. dropout stands right before a batch norm, whose statistics it changes between training and evaluation;
    5. ``norm2`` was put into eval mode once and for all when training began, so its statistics were never updated
       (see ``train``).
    """

    def __init__(self, *, faulty: bool = False) -> None:
        super().__init__()
        self.faulty = faulty
        momentum = 0.99 if faulty else 0.1
        self.conv1 = nn.Conv2d(1, 24, 3, padding=1, bias=faulty)
        self.norm1 = nn.BatchNorm2d(24, momentum=momentum)
        self.conv2 = nn.Conv2d(24, 48, 3, padding=1, bias=faulty)
        self.norm2 = nn.BatchNorm2d(48, momentum=momentum)
        self.token_norm = nn.LayerNorm(16 if faulty else 48)
        self.hidden = nn.Linear(48, 64, bias=False)
        self.dropout = nn.Dropout(0.3)
        self.norm3 = nn.BatchNorm1d(64, momentum=momentum)
        self.classify = nn.Linear(64, 10)

    def train(self, mode: bool = True) -> DigitNet:
        super().train(mode)
        if self.faulty:
            self.norm2.eval()  # "the pretrained part stays frozen": but nothing here was pretrained
        return self

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm1(self.conv1(pixels)))
        x = nn.functional.max_pool2d(torch.relu(self.norm2(self.conv2(x))), 2)
        x = x.flatten(2)  # (B, channels, positions)
        x = self.token_norm(x) if self.faulty else self.token_norm(x.transpose(1, 2)).transpose(1, 2)
        x = self.hidden(x.mean(2))
        if self.faulty:
            x = torch.relu(self.norm3(self.dropout(x)))
        else:
            x = self.dropout(torch.relu(self.norm3(x)))
        output: torch.Tensor = self.classify(x)
        return output
