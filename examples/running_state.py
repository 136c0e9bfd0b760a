"""Running state: which variance normalizes, which one is stored, and what evaluation does with it.

Batch norm normalizes a training batch by its biased variance, sum / M, and stores the unbiased one, sum / (M - 1).
So a layer that has just stored a batch gives another output for it in evaluation than it gave in training.
"""

import torch
from torch import nn

import normscope as ns
from normscope.reading import read

torch.set_default_dtype(torch.float64)
x = torch.tensor([[1.0], [2.0], [6.0]])
norm = nn.BatchNorm1d(1, momentum=1.0)  # the update fraction: the state becomes the batch
spec = ns.spec_of(norm)
print(spec)

state = ns.RunningState(mean=norm.running_mean.numpy().copy(), var=norm.running_var.numpy().copy())
state = ns.reference.update_running(state, x.numpy(), spec)
in_training = norm(x).detach()
print(f"biased variance   {x.var(correction=0):.6f}  normalizes in training")
print(f"unbiased variance {norm.running_var.item():.6f}  is stored, M / (M - 1) = 1.5 times as much")
assert abs(norm.running_var.item() - state.var.item()) < 1e-14
assert abs(norm.running_var.item() / x.var(correction=0).item() - 1.5) < 1e-14

norm.eval()
in_evaluation = norm(x).detach()
print(f"the same input: in training {in_training[2].item():.6f}, in evaluation {in_evaluation[2].item():.6f}")
ratio = (in_training / in_evaluation).mean().item()
print(f"their ratio {ratio:.6f} is sqrt(1.5), but for eps")
assert abs(ratio - 1.5**0.5) < 1e-5

# track_running_stats=False on a layer that has buffers does not freeze it: training normalizes by the batch still.
norm.track_running_stats = False
now = read(norm)
print(f"after track_running_stats = False: {now.mode_train} in training, {now.mode_eval} in evaluation")
assert (now.mode_train, now.mode_eval, now.updates) == ("batch", "running", ())

# momentum=None is the plain mean over all batches.
norm = nn.BatchNorm1d(1, momentum=None)
batches = [x, x + 3, x * 2]
for batch in batches:
    norm(batch)
mean_of_means = sum(batch.mean().item() for batch in batches) / 3
print(
    f"momentum=None after 3 batches: {norm.running_mean.item():.6f}, the mean of their means {mean_of_means:.6f}"
)
assert abs(norm.running_mean.item() - mean_of_means) < 1e-14
