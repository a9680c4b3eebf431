"""Cross entropy with a chunk_size: the same loss and gradient, and no second tensor of the logits' size."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pulsetrain.engine.losses import cross_entropy

OPTIONS = [
    {},
    {"label_smoothing": 0.1},
    {"z_loss": 0.01},
    {"label_smoothing": 1.0, "z_loss": 0.1},
    {"ignore_index": 3, "label_smoothing": 0.2, "z_loss": 0.1},
]


class Allocations(TorchDispatchMode):
    """How many elements each tensor has that an operation makes in memory of its own, with its dtype."""

    def __init__(self):
        super().__init__()
        self.made = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        given = {leaf.untyped_storage().data_ptr() for leaf in tensors((args, kwargs))}
        self.made += [
            (leaf.numel(), leaf.dtype) for leaf in tensors(result) if leaf.untyped_storage().data_ptr() not in given
        ]
        return result

    def of_size(self, numel):
        return [dtype for elements, dtype in self.made if elements >= numel]


def tensors(tree):
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def random_batch(shape, classes, dtype=torch.float64):
    generator = torch.Generator().manual_seed(classes)
    logits = 3 * torch.randn(*shape, classes, generator=generator, dtype=torch.float64)
    targets = torch.randint(classes, shape, generator=generator)
    if targets.numel() > 2:
        targets.view(-1)[1] = -100
    return logits.to(dtype).requires_grad_(), targets


def loss_and_gradient(logits, targets, **options):
    loss = cross_entropy(logits, targets, **options)
    return loss, torch.autograd.grad(loss, logits)[0]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(
    ("shape", "classes", "chunk_size"),
    [((6,), 11, 4), ((2, 3), 1009, 100), ((4,), 5, 1), ((4,), 7, 100), ((4,), 8, 4), ((), 11, 4)],
)
def test_the_loss_and_its_gradient_are_those_of_the_whole(shape, classes, chunk_size, options):
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-6)):
        logits, targets = random_batch(shape, classes, dtype)
        options = {"ignore_index": -100, **options}
        targets = targets.masked_fill(targets == -100, options["ignore_index"])
        whole, gradient = loss_and_gradient(logits, targets, **options)
        chunked, chunked_gradient = loss_and_gradient(logits, targets, chunk_size=chunk_size, **options)
        assert (chunked.dtype, chunked.shape, chunked_gradient.dtype) == (dtype, (), dtype)
        torch.testing.assert_close(chunked, whole, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(chunked_gradient, gradient, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_gradient_is_the_derivative_of_the_loss(options):
    logits, targets = random_batch((2, 3), 7)
    targets = targets.masked_fill(targets == -100, options.get("ignore_index", -100))
    torch.autograd.gradcheck(lambda x: cross_entropy(x, targets, chunk_size=3, **options), logits)


@pytest.mark.parametrize("options", OPTIONS[:4], ids=str)
def test_bf16_logits_give_what_their_float32_copy_gives(options):
    logits, targets = random_batch((5,), 301, torch.bfloat16)
    whole, gradient = loss_and_gradient(logits.detach().float().requires_grad_(), targets, **options)
    chunked, chunked_gradient = loss_and_gradient(logits, targets, chunk_size=64, **options)
    assert (chunked.dtype, chunked_gradient.dtype) == (torch.float32, torch.bfloat16)
    torch.testing.assert_close(chunked, whole, rtol=1e-6, atol=0)
    torch.testing.assert_close(chunked_gradient, gradient.bfloat16(), rtol=2**-7, atol=1e-9)


def test_the_gradient_of_a_sure_bf16_prediction_does_not_vanish():
    logits = torch.tensor([[8.0, 0.0, 0.0]], dtype=torch.bfloat16, requires_grad=True)
    _, gradient = loss_and_gradient(logits, torch.tensor([0]), chunk_size=2)
    by_hand = -2 / (math.exp(8) + 2)  # p - 1, and p itself rounds to 1
    assert gradient[0, 0].item() == pytest.approx(by_hand, rel=2**-8)


@pytest.mark.parametrize("shape", [(4,), (0,)])
def test_where_every_target_is_ignored_the_loss_is_nan_and_the_gradient_zero_as_of_the_whole(shape):
    logits = torch.randn(*shape, 5, requires_grad=True)
    for options in ({}, {"chunk_size": 2}):
        loss, gradient = loss_and_gradient(logits, torch.full(shape, -100), **options)
        assert loss.isnan()
        assert torch.equal(gradient, torch.zeros_like(logits))


def test_logits_of_minus_infinity_are_classes_that_cannot_be():
    logits = torch.tensor([[1.0, -math.inf, 2.0, -math.inf], [0.0, 1.0, -math.inf, -math.inf]], requires_grad=True)
    targets = torch.tensor([2, 0])
    whole, gradient = loss_and_gradient(logits, targets)
    for chunk_size in (1, 2, 3):
        chunked, chunked_gradient = loss_and_gradient(logits, targets, chunk_size=chunk_size)
        torch.testing.assert_close(chunked, whole)
        torch.testing.assert_close(chunked_gradient, gradient)


def largest_allocation(function):
    """Bytes of the largest memory that an operation takes for its result or for itself, inside torch's kernels too."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        function()
    return max(event.self_cpu_memory_usage for event in recorded.events())


def test_the_forward_pass_takes_no_memory_of_the_size_of_the_logits():
    logits, targets = random_batch((16,), 1000, torch.float32)
    with Allocations() as whole:
        F.cross_entropy(logits, targets)
    with Allocations() as chunked:
        cross_entropy(logits, targets, chunk_size=100, label_smoothing=0.1, z_loss=0.1)
    assert (whole.of_size(logits.numel()), chunked.of_size(logits.numel())) == ([torch.float32], [])
    assert largest_allocation(lambda: F.cross_entropy(logits, targets)) == 16 * 1000 * 4
    assert largest_allocation(lambda: cross_entropy(logits, targets, chunk_size=100)) == 16 * 100 * 4


def test_a_part_of_other_logits_is_not_copied_either():
    whole, targets = random_batch((4, 5), 300, torch.float32)
    logits = whole[:, :-1]  # a view that no reshape can flatten without a copy
    with Allocations() as made:
        loss = cross_entropy(logits, targets[:, 1:], chunk_size=50)
    assert made.of_size(logits.numel()) == []
    assert loss.item() == pytest.approx(cross_entropy(logits, targets[:, 1:]).item(), rel=1e-6)


def test_under_autocast_bf16_logits_stay_as_they_are():
    logits, targets = random_batch((16,), 1000, torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        with Allocations() as whole:
            expected = F.cross_entropy(logits, targets)
        with Allocations() as chunked:
            loss = cross_entropy(logits, targets, chunk_size=100)
    assert whole.of_size(logits.numel()) == [torch.float32, torch.float32]  # the logits and their log_softmax
    assert chunked.of_size(logits.numel()) == []
    torch.testing.assert_close(loss, expected)


def test_the_backward_pass_makes_one_tensor_of_the_size_of_the_logits_in_their_dtype():
    logits, targets = random_batch((16,), 1000, torch.bfloat16)
    loss = cross_entropy(logits, targets, chunk_size=100, label_smoothing=0.1, z_loss=0.1)
    with Allocations() as made:
        torch.autograd.grad(loss, logits)
    assert made.of_size(16 * 101) == [torch.bfloat16]


def test_only_the_callers_logits_and_one_number_a_row_are_saved_for_the_backward_pass():
    logits, targets = random_batch((16,), 1000, torch.float32)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        cross_entropy(logits, targets, chunk_size=100)
    assert [tensor.data_ptr() for tensor in saved if tensor.numel() > 16] == [logits.data_ptr()]


def test_it_can_be_differentiated_by_torch_func():
    logits, targets = random_batch((6,), 11)
    gradient = torch.func.grad(lambda x: cross_entropy(x, targets, chunk_size=4))(logits.detach())
    torch.testing.assert_close(gradient, loss_and_gradient(logits, targets)[1], rtol=1e-12, atol=1e-12)


def test_a_second_derivative_is_refused_rather_than_wrong():
    logits, targets = random_batch((6,), 11)
    loss = cross_entropy(logits, targets, chunk_size=4)
    (gradient,) = torch.autograd.grad(loss, logits, create_graph=True)
    with pytest.raises(
        RuntimeError, match=r"cross_entropy\(chunk_size=4\): has no second derivative; leave chunk_size"
    ):
        torch.autograd.grad(gradient.square().sum(), logits)
