"""Private names of Python and torch that this package uses because there is no public one: they are still there."""

import sys
import threading

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ChainedScheduler, ExponentialLR, SequentialLR
from torch.utils.data import DataLoader, Dataset, get_worker_info

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


class Starts(Dataset[int]):
    """Each item is the seed of the worker that read it, which torch draws when the worker starts."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        return get_worker_info().seed


@pytest.mark.slow
def test_a_loader_without_its_iterator_starts_its_persistent_workers_again():
    """The trainer seeds each pass, and torch seeds workers only when they start; LRFinder copies a loader."""
    loader = DataLoader(Starts(), num_workers=1, persistent_workers=True)
    first, kept = ([seed.item() for seed in loader] for _ in range(2))
    assert vars(loader)["_iterator"] is not None
    loader._iterator = None
    again = [seed.item() for seed in loader]
    assert first == kept != again


def test_a_loader_has_no_iterator_before_its_first_pass():
    assert vars(DataLoader([1, 2]))["_iterator"] is None


@pytest.mark.parametrize("fused", [True, False])
def test_a_fused_optimizer_says_that_it_skips_steps_itself(fused):
    """In fp16 such an optimizer is given `found_inf`; others would ignore it and make the step."""
    optimizer = torch.optim.Adam([nn.Parameter(torch.ones(2))], fused=fused)
    assert getattr(optimizer, "_step_supports_amp_scaling", False) is fused


@pytest.mark.parametrize("found_inf", [0.0, 1.0])
def test_a_fused_optimizer_skips_the_step_where_found_inf_is_set(found_inf):
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([parameter], lr=0.1, fused=True)
    optimizer.grad_scale, optimizer.found_inf = None, torch.tensor(found_inf)
    parameter.grad = torch.ones(2)
    optimizer.step()
    assert torch.equal(parameter, torch.ones(2)) is bool(found_inf)


@pytest.mark.parametrize("join", [ChainedScheduler, lambda parts: SequentialLR(parts[0].optimizer, parts, [3])])
def test_a_scheduler_of_schedulers_holds_them(join):
    """add_warmup looks whether any of them was stepped."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    parts = [ExponentialLR(optimizer, 0.5), ExponentialLR(optimizer, 0.9)]
    assert list(join(parts)._schedulers) == parts


def test_torch_schedules_do_not_warn_where_an_optimizer_counts_as_called(recwarn):
    """The view of a functional optimizer makes no step itself."""
    for called in (True, False):
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
        scheduler = ExponentialLR(optimizer, 0.5)
        optimizer._opt_called = called
        scheduler.step()
        assert len(recwarn) == (not called)
    assert "lr_scheduler.step()" in str(recwarn.pop().message)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_iterator_of_a_loader_counts_the_batches_that_it_has_given(workers: int):
    iterator = iter(DataLoader([1, 2, 3], num_workers=workers))
    assert vars(iterator)["_num_yielded"] == 0
    next(iterator)
    next(iterator)
    assert vars(iterator)["_num_yielded"] == 2
