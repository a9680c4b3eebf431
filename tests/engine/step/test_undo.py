"""What was remembered is put back in place: the same objects with their earlier contents."""

from collections import deque

import torch
from torch import nn

from pulsetrain.engine.step.undo import Undo


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("seen", torch.zeros(()))
        self.calls, self.sizes = 0, [1]


def test_a_modules_tensors_and_attributes_come_back_in_the_same_objects():
    module = Counting()
    weight, sizes = module.weight, module.sizes
    undo = Undo(module)
    with torch.no_grad():
        module.weight.add_(1)
    module.seen, module.calls, module.late = torch.ones(()), 5, "new"
    module.sizes.append(2)
    undo.put_back()
    assert module.weight is weight
    assert module.weight.tolist() == [1.0, 1.0]
    assert (module.seen.item(), module.calls) == (0.0, 0)
    assert module.sizes is sizes
    assert sizes == [1]
    assert not hasattr(module, "late")


def test_containers_of_every_kind_come_back():
    containers = {"list": [1, [2]], "deque": deque([1], maxlen=3), "set": {1}, "dict": {"a": 1}, "tuple": ([1],)}
    undo = Undo(containers)
    containers["list"][1].append(3)
    containers["deque"].append(2)
    containers["set"].add(2)
    containers["dict"]["a"] = 2
    containers["tuple"][0].clear()
    containers["more"] = 1
    undo.put_back()
    expected = {"list": [1, [2]], "deque": deque([1]), "set": {1}, "dict": {"a": 1}, "tuple": ([1],)}
    assert containers == expected


def test_a_container_that_holds_itself_is_remembered_once():
    loop = [1]
    loop.append(loop)
    undo = Undo(loop)
    loop.clear()
    undo.put_back()
    assert loop[0] == 1
    assert loop[1] is loop


def test_an_expanded_tensor_cannot_be_written_and_is_left_alone():
    undo = Undo(torch.ones(1).expand(3))
    undo.put_back()
