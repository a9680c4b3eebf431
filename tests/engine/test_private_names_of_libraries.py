"""The private names of torch and ignite that engine/ uses still exist and mean the same."""

from __future__ import annotations

import torch
from ignite.engine import Engine as IgniteEngine
from ignite.engine import Events as IgniteEvents
from ignite.metrics import Accuracy, RunningAverage
from torch import nn


def test_a_tensor_counts_writes():
    tensor = torch.zeros(2)
    before = tensor._version
    tensor.add_(1)
    assert tensor._version == before + 1


def test_an_operator_says_whether_it_changes_its_arguments_and_how_they_are_called():
    schema = torch.ops.aten.native_dropout.default._schema
    assert not schema.is_mutable
    assert [each.name for each in schema.arguments] == ["input", "p", "train"]
    assert torch.ops.aten.add_.Tensor._schema.is_mutable
    assert "aten::add_.Tensor" in torch._C._dispatch_get_all_op_names()


def test_an_optimizer_can_put_its_hooks_around_the_step_of_a_new_class():
    optimizer = torch.optim.SGD([torch.zeros(2)], lr=0.1)
    optimizer.__class__ = type("SGD", (torch.optim.SGD,), {"step": lambda self: "own"})
    optimizer._patch_step_function()
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    assert optimizer.step() == "own"
    assert calls == ["after"]


def test_a_module_keeps_its_tensors_and_submodules_in_dicts():
    module = nn.Sequential(nn.BatchNorm1d(2))
    norm = module[0]
    assert module._modules == {"0": norm}
    assert norm._parameters == dict(norm.named_parameters())
    assert norm._buffers == dict(norm.named_buffers())


def test_a_module_knows_its_buffers_that_are_not_saved():
    module = nn.Module()
    module.register_buffer("saved", torch.zeros(1))
    module.register_buffer("derived", torch.zeros(1), persistent=False)
    assert module._non_persistent_buffers_set == {"derived"}


def test_the_backward_pass_has_an_id():
    ids = [torch._C._current_graph_task_id()]
    leaf = torch.ones(1, requires_grad=True)
    leaf.register_hook(lambda gradient: ids.append(torch._C._current_graph_task_id()))
    leaf.sum().backward()
    assert ids[0] == -1 != ids[1]


def test_an_operation_says_whether_it_returns_anything():
    assert torch.ops.aten.add.Tensor._schema.returns
    assert not torch.ops.aten._fused_sgd_.default._schema.returns


def test_a_gradient_scaler_knows_which_gradients_overflowed():
    parameter = nn.Parameter(torch.ones(1))
    optimizer, scaler = torch.optim.SGD([parameter], lr=0.1), torch.amp.GradScaler("cpu")
    scaler.scale(parameter.sum() * torch.inf).backward()
    scaler.unscale_(optimizer)
    assert [each.item() for each in scaler._found_inf_per_device(optimizer).values()] == [1.0]


def test_ignite_finds_the_handler_of_a_filtered_one_under_parent():
    engine = IgniteEngine(lambda engine, batch: None)

    def handler() -> None: ...

    engine.add_event_handler(IgniteEvents.ITERATION_COMPLETED(every=2), handler)
    ((shown, _, _),) = engine._event_handlers[IgniteEvents.ITERATION_COMPLETED]
    assert shown._parent() is handler


def test_ignite_asks_whether_a_run_is_done_by_a_static_method():
    engine = IgniteEngine(lambda engine, batch: None)
    assert not IgniteEngine._is_done(engine.state)
    engine.run([1, 2], max_epochs=1)
    assert IgniteEngine._is_done(engine.state)


def test_a_metric_of_one_number_names_no_keys_and_keeps_its_transform():
    metric = RunningAverage(output_transform=abs)
    assert metric.required_output_keys is None
    assert metric._output_transform is abs
    assert Accuracy.required_output_keys == ("y_pred", "y")
