"""Private names of Python and torch that this package uses because there is no public one: they are still there."""

import sys
import threading

import pytest
import torch
from torch import nn

from pulsetrain.handlers.monitors.flop_count import is_compiled


def test_sys_gives_the_frames_of_all_threads():
    """The hang watchdog reads the main thread's."""
    assert sys._current_frames()[threading.get_ident()].f_code.co_filename == __file__


@pytest.mark.slow
def test_a_module_shows_whether_it_is_compiled():
    """FLOPs are not counted on a compiled model. Nothing is compiled before the first call."""
    plain, in_place = nn.Linear(2, 2), nn.Linear(2, 2)
    in_place.compile()
    assert [is_compiled(each) for each in (plain, in_place, torch.compile(plain))] == [False, True, True]


@pytest.mark.parametrize("kind", [1.0, 2.0, float("inf")])
def test_torch_computes_the_norms_of_a_list_of_tensors(kind):
    """GradientMonitor measures all gradients with one kernel."""
    tensors = [torch.tensor([3.0, -4.0], dtype=torch.bfloat16), torch.tensor([[1.0]], dtype=torch.bfloat16)]
    norms = torch._foreach_norm(tensors, kind, dtype=torch.float32)
    torch.testing.assert_close(list(norms), [torch.linalg.vector_norm(each.float(), kind) for each in tensors])


def test_torch_says_whether_a_profiler_is_active():
    """Profiler does not start a second one, which would abort the process."""
    assert not torch.autograd._profiler_enabled()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert torch.autograd._profiler_enabled()
