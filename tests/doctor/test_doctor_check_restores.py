"""A whole check leaves everything as it was: the session's law with every probe and watch at work."""

from __future__ import annotations

import pytest
import torch
from session_gallery import GALLERY, Interrupting, fingerprint, world
from torch import nn

import normscope

torch.set_num_threads(1)


@pytest.mark.filterwarnings("ignore:.*spectral_norm.*:FutureWarning")
@pytest.mark.parametrize("name", GALLERY)
def test_check_leaves_everything_as_before(name):
    torch.manual_seed(0)
    model = GALLERY[name]()
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    x = torch.randn(4, 6).to(dtype)
    before, around = fingerprint(model, x), world()
    hooks = dict(nn.modules.module._global_forward_hooks), dict(nn.modules.module._global_forward_pre_hooks)
    report = normscope.check(model, x)
    assert report.sites
    assert world() == around
    assert fingerprint(model, x) == before
    assert (nn.modules.module._global_forward_hooks, nn.modules.module._global_forward_pre_hooks) == hooks


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_check_that_fails_leaves_everything_as_before(error):
    model, x = Interrupting(GALLERY["Remembers"](), error), torch.randn(4, 6)
    before, around = fingerprint(model, x), world()
    with pytest.raises((normscope.errors.ModelError, KeyboardInterrupt)):
        normscope.check(model, x)
    assert world() == around
    assert fingerprint(model, x) == before
