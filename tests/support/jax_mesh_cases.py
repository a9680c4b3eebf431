"""What JaxBackend computes on 4 virtual devices of the CPU.

jax fixes the number of devices when it is first used, so the cases run in a process of their own, which prints what it
finds as JSON; `on_four_devices` starts it.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from signal import SIGKILL
from typing import Any

import numpy as np
import torch

from pulsetrain import Trainer, TrainingConfig
from pulsetrain.engine import ConfigurationError, Events, JaxBackend, SupervisedStrategy, TrainerCore
from pulsetrain.engine.step.protocols import BackendSettings, TrainingBatch
from pulsetrain.handlers import SWA, EventRecorder, LRFinder, NaNGuard
from pulsetrain.handlers.recorder.fingerprints import fingerprint_of
from tests.faults.everything import logged
from tests.support import programs
from tests.support.models import batches, bits, function_model, nnx_model, torch_model
from tests.support.runs_backends import JAX, On, make, saved, whole_state

THIS = "tests.support.jax_mesh_cases"
DEVICES = "XLA_FLAGS"
Found = dict[str, Any]
CASES: dict[str, Callable[[], Found]] = {}


def on_four_devices(*names: str, **variables: str) -> dict[str, Found]:
    """What these cases found, by their names."""
    four = {DEVICES: "--xla_force_host_platform_device_count=4", "OMP_NUM_THREADS": "1", **variables}
    done = programs.run("-m", THIS, *names, cwd=programs.ROOT, env={**os.environ, **four}, timeout=600)
    assert done.returncode == 0, done.stderr
    found: dict[str, Found] = json.loads(done.stdout.splitlines()[-1])
    return found


def case(function: Callable[[], Found]) -> Callable[[], Found]:
    CASES[function.__name__] = function
    return function


# ------------------------------------------------------------------------------------------- the same numbers

TENSOR = {
    "in/kernel": [None, "model"],
    "in/bias": ["model"],
    "between/kernel": [None, "model"],
    "out/kernel": ["model", None],
}
_WITHOUT_BETWEEN = {path: axes for path, axes in TENSOR.items() if path != "between/kernel"}
WAYS: dict[str, dict[str, Any]] = {
    "data": {"mesh": {"data": 4}},
    "fsdp": {"mesh": {"data": 4}, "sharding": "fsdp"},
    "tensor": {"mesh": {"model": 4}, "sharding": TENSOR},
    "both": {"mesh": {"data": 2, "model": 2}, "sharding": {**_WITHOUT_BETWEEN, "*": "fsdp"}},
}
STEPS = 50


def network(weights: Any, inputs: Any, train: bool, key: Any) -> Any:
    """With dropout, and with statistics of the whole batch."""
    import jax

    hidden = jax.nn.gelu(inputs @ weights["in"]["kernel"] + weights["in"]["bias"])
    if train:
        hidden = hidden * jax.random.bernoulli(key, 0.9, hidden.shape) / 0.9
    hidden = (hidden - hidden.mean(0)) / (hidden.std(0) + 1e-3)
    return jax.nn.gelu(hidden @ weights["between"]["kernel"]) @ weights["out"]["kernel"]


def network_weights(dtype: str) -> Any:
    draw = partial(np.random.default_rng(0).normal, 0.0)
    shapes = {"in": (64, 256), "between": (256, 128), "out": (128, 4)}
    kernels = {name: {"kernel": draw(shape[0] ** -0.5, shape).astype(dtype)} for name, shape in shapes.items()}
    kernels["in"]["bias"] = np.zeros(256, dtype)
    return kernels


def trained(dtype: str, way: dict[str, Any]) -> tuple[TrainerCore, Any, list[list[float]]]:
    """Losses and norms of 50 steps."""
    backend = JaxBackend("cpu", **way)
    settings = BackendSettings(device="cpu", clip_grad_norm=0.5)
    core = TrainerCore(backend, SupervisedStrategy("mse"), settings)
    model = network, network_weights(dtype)
    # eps: by the usual one, Adam divides gradients that are nearly 0 by themselves, which magnifies their rounding
    state = core.init(model, "adamw", learning_rate=1e-3, weight_decay=0.1, eps=1e-6)
    generator, numbers = torch.Generator().manual_seed(0), []
    for _ in range(STEPS):
        inputs = torch.randn(16, 64, generator=generator, dtype=getattr(torch, dtype))
        result = core.train_step((inputs, inputs[:, :4].sin()), state)
        state = result.state
        numbers.append([float(result.loss), float(result.metrics["grad_norm"])])
    return core, state, numbers


@case
def numbers() -> Found:
    """Differences to one device, and how everything is split."""
    import jax

    dtype = "float64" if jax.config.jax_enable_x64 else "float32"
    core, state, expected = trained(dtype, {})
    weights = core.backend.flat(state.weights)
    found: Found = {"one": {"losses": [loss for loss, _ in expected], "norms": [norm for _, norm in expected]}}
    for name, way in WAYS.items():
        core, state, computed = trained(dtype, way)
        difference = np.abs(np.array(computed) - np.array(expected)).max(0)
        mine = core.backend.flat(state.weights)
        leaves = core.backend.paths((state.weights["parameters"], state.optimizer))
        found[name] = {
            "loss": difference[0],
            "norm": difference[1],
            "weights": max(float((mine[path] - weights[path]).abs().max()) for path in weights),
            "compiled": counted(core.backend),
            "split": {path: describe(leaf) for path, leaf in leaves.items() if not leaf.is_fully_replicated},
            "devices": {len(leaf.devices()) for leaf in leaves.values()}.pop(),
        }
    return found


def describe(leaf: Any) -> list[Any]:
    """The axes of an array, and the shape of the part on each device."""
    return [str(leaf.sharding.spec), list(leaf.addressable_data(0).shape)]


def counted(backend: Any) -> dict[str, list[int]]:
    """How often each kind of program was traced, and how many entries its cache has: both 1 if compiled once."""
    cached: Counter[str] = Counter()
    for key, program in backend._programs.items():
        cached[key[0]] += program._cache_size()
    return {kind: [count, cached[kind]] for kind, count in backend.compiled.items() if count}


# --------------------------------------------------------------------------------------------- compilations

SMALL = {"0.weight": ["model", None], "2.weight": [None, "model"]}
NNX = {"first/kernel": [None, "model"], "last/kernel": ["model"]}
MESH = partial(JaxBackend, mesh={"data": 2, "model": 2}, sharding=SMALL)


def small_run(handlers: Any = (), data: Any = None, backend: Any = None, model: Any = None, **settings: Any) -> Trainer:
    return Trainer(
        function_model(torch_model().state_dict()) if model is None else model,
        batches(20) if data is None else data,
        batches(5),
        backend=backend or MESH(),
        config=TrainingConfig(**{"max_epochs": 2, "learning_rate": 0.01, "device": "cpu", **settings}),
        handlers=handlers,
    )


def compilations(run: Trainer) -> Found:
    """Programs, and what XLA has compiled since the last call."""
    listened = [name for name in _compiled if name == "jit(counted)"]
    _compiled.clear()
    return {"programs": counted(run.backend), "xla": len(listened), "split": split_of(run)}


def split_of(run: Trainer) -> list[str]:
    """What of the weights and the optimizer's state is split, and how."""
    state = run.model_state
    return layout(run.backend.paths((state.weights["parameters"], state.optimizer)))


def layout(leaves: dict[str, Any]) -> list[str]:
    return sorted(f"{path} {leaf.sharding.spec}" for path, leaf in leaves.items() if not leaf.is_fully_replicated)


_compiled: list[Any] = []


@case
def programs_of_runs() -> Found:
    found: Found = {}

    def note(name: str, run: Trainer) -> None:
        run.train()
        found[name] = compilations(run)

    note("plain", small_run())
    note("clipping", small_run(schedule="cosine", warmup_steps=5, clip_grad_norm=1.0, clip_grad_value=0.1))
    note("accumulation", small_run(accumulate=3, clip_grad_norm=1.0))
    note("guard", small_run([NaNGuard()]))
    norm = nnx_model(torch_model().state_dict(), 0.3, norm=True)
    run = small_run(model=norm, backend=JaxBackend(mesh={"data": 2, "model": 2}, sharding=NNX))
    note("nnx", run)
    norm.eval()
    inputs = batches(1)[0][0]
    difference = np.abs(np.asarray(norm(inputs.numpy())) - run.model(inputs).numpy())
    found["nnx"]["published"] = float(difference.max())
    _compiled.clear()  # the call of the model
    note("finder", small_run([LRFinder(iterations=20)]))  # its steps are rolled back

    written = small_run()

    @written.on(Events.EPOCH_COMPLETED)
    @torch.no_grad()
    def shrink(engine: Any) -> None:
        for parameter in engine.model.parameters():
            parameter.mul_(0.5)

    note("written", written)
    return found


@case
def smaller_batch() -> Found:
    """The last of 3 batches has 7 rows: all devices compute it, and no row is lost."""
    inputs, targets = batches(1)[0]
    data = [*batches(2), (inputs[:7], targets[:7])]
    runs = {name: small_run(data=data, backend=make()) for name, make in (("mesh", MESH), ("one", JaxBackend))}
    _compiled.clear()
    runs["mesh"].train()
    found = {"compiled": compilations(runs["mesh"])}
    runs["one"].train()
    mine, theirs = (runs[name].model.state_dict() for name in ("mesh", "one"))
    return {
        **found,
        "difference": max(float((mine[name] - theirs[name]).abs().max()) for name in mine),
        "samples": [run.state.samples for run in runs.values()],
    }


def wide(weights: Any, inputs: Any) -> Any:
    """With its kernel alone split, XLA would split the gradients of scale and shift, too, but not in each program."""
    import jax

    return jax.nn.gelu(inputs @ weights["kernel"] * weights["scale"] + weights["shift"]) @ weights["out"]


def wide_weights() -> Any:
    draw = np.random.default_rng(0).normal
    shapes = {"kernel": (64, 4096), "scale": (4096,), "shift": (4096,), "out": (4096, 4)}
    return {name: draw(0.0, 0.1, shape).astype("float32") for name, shape in shapes.items()}


@case
def split_steps() -> Found:
    """A step in one program and one in three have the same bits."""
    found: Found = {}
    partly = {"mesh": {"data": 2, "model": 2}, "sharding": {"kernel": [None, "model"]}}
    for name, way in {**WAYS, "partly": partly}.items():
        model = (wide, wide_weights()) if name == "partly" else (network, network_weights("float32"))
        settings = BackendSettings(device="cpu", clip_grad_norm=0.1)
        core = TrainerCore(JaxBackend("cpu", **way), SupervisedStrategy("mse"), settings)
        backend = core.backend
        whole = parts = core.init(model, "adamw", learning_rate=0.01)
        split, norms = [], []
        for inputs in torch.randn(5, 16, 64, generator=torch.Generator().manual_seed(0)):
            batch = inputs, inputs[:, :4]
            result = core.train_step(batch, whole)
            gradients = backend.forward_backward(parts, backend.prepare_batch(batch, core.strategy), core.strategy)
            gradients = backend.finish_gradients(parts, gradients)
            trees = gradients.gradients, parts.weights["parameters"]
            pairs = zip(*(backend.paths(tree).values() for tree in trees), strict=True)
            split += [gradient.sharding == parameter.sharding for gradient, parameter in pairs]
            norms.append([float(result.metrics["grad_norm"]), float(gradients.grad_norm)])
            whole, parts = result.state, backend.apply_gradients(parts, gradients)
        found[name] = {"equal": bits(backend, whole) == bits(backend, parts), "split": all(split), "norms": norms}
    return found


@case
def batches_split() -> Found:
    """How a batch of 16 rows and one of 7 reach the model: in training, in evaluation, when the model is called."""
    import jax

    seen: list[str] = []

    def watched(weights: Any, inputs: Any) -> Any:
        jax.debug.inspect_array_sharding(
            inputs, callback=lambda sharding: seen.append(str(sharding.shard_shape((16, 4))))
        )
        return inputs @ weights["kernel"]

    core = TrainerCore(JaxBackend("cpu", mesh={"data": 2, "model": 2}), SupervisedStrategy("mse"), check=False)
    state = core.init((watched, {"kernel": np.ones((4, 1), "float32")}), "sgd")
    found: Found = {}
    for rows in (16, 7):
        batch = torch.ones(rows, 4), torch.ones(rows, 1)
        steps: dict[str, Callable[[], object]] = {
            "train": partial(core.train_step, batch, state),
            "evaluate": partial(core.eval_step, batch, state),
            "call": partial(core.backend.outputs, state.weights, batch[:1]),
        }
        for name, step in steps.items():
            seen.clear()
            result = step()
            found[f"{name} {rows}"] = sorted(set(seen))
            state = result.state if name == "train" else state  # type: ignore[attr-defined]
    return found


@case
def one_row() -> Found:
    """What has one row, such as positions, belongs to all rows of a batch, and reaches each device whole."""

    def shifted(weights: Any, inputs: Any, positions: Any) -> Any:
        return (inputs + positions) @ weights["kernel"]

    found: Found = {"losses": {}}
    for name, way in {"one": {}, "mesh": {"mesh": {"data": 2, "model": 2}}}.items():
        core = TrainerCore(JaxBackend("cpu", **way), Shifted("mse"), check=False)
        state = core.init((shifted, {"kernel": np.ones((4, 1), "float32")}), "sgd")
        losses = []
        for rows in (16, 16, 7):
            drawn = torch.randn(rows, 4, generator=torch.Generator().manual_seed(rows))
            result = core.train_step({"inputs": drawn, "positions": torch.arange(4.0)[None], "y": drawn[:, :1]}, state)
            state = result.state
            losses.append(float(result.loss))
        found["losses"][name] = losses
    arrays = {"inputs": np.ones((16, 4)), "positions": np.ones((1, 4)), "scale": np.float32(1.0)}
    for name, placed in core.backend.placement.put_batch(arrays, first=True).items():
        found[name] = list(placed.addressable_data(0).shape) if np.ndim(placed) else []
    alone = core.backend.placement.put_batch({"inputs": np.ones((1, 4))})["inputs"]
    found["alone"] = list(alone.addressable_data(0).shape)
    return found


class Shifted(SupervisedStrategy):
    """Batches with positions, of shape (1, length)."""

    def prepare_batch(self, batch: Any) -> TrainingBatch:
        inputs = {name: batch[name] for name in ("inputs", "positions")}
        return TrainingBatch(inputs, batch["y"], samples=len(batch["y"]))


@case
def averages() -> Found:
    """The mean of late weights, of a run on the mesh and of one on one device."""
    found: Found = {}
    weights: dict[str, Any] = {}
    for name, backend in (("mesh", MESH()), ("one", JaxBackend())):
        average = SWA(after_epoch=0)
        run = small_run([average], backend=backend)
        history = run.train()
        raw = {path: each.clone() for path, each in run.model.state_dict().items()}
        with average.applied():
            weights[name] = {path: each.clone() for path, each in run.model.state_dict().items()}
        found[name] = {
            "count": average.number_averaged,
            "losses": history["val/loss"],
            "moved": max(float((raw[path] - each).abs().max()) for path, each in weights[name].items()),
            "split": split_of(run) != [],
        }
    pairs = [(weights["mesh"][path], weights["one"][path]) for path in weights["one"]]
    return {**found, "difference": max(float((mine - its).abs().max()) for mine, its in pairs)}


# ---------------------------------------------------------------------------------- checkpoints and whole runs

RULES = {"first/kernel": [None, "model"], "last/kernel": ["model", None]}
ON_MESH = On("jax-mesh", partial(JaxBackend, mesh={"data": 2, "model": 2}, sharding=RULES), JAX.model)


def digests(run: Trainer) -> list[int]:
    found = fingerprint_of(run.model, run.optimizer)
    return [int(found.weights), int(found.buffers), int(found.optimizer)]


@case
def checkpoints() -> Found:
    """Saved on a mesh and loaded on one device, and the other way round."""
    found: Found = {}
    for name, saves, loads in (("to one", ON_MESH, JAX), ("to mesh", JAX, ON_MESH)):
        with tempfile.TemporaryDirectory() as folder:
            before, after, inside = (
                make(on, Path(folder, str(number)), max_epochs=2) for number, on in enumerate((saves, loads, loads))
            )
            whole = before.train()
            after.load_checkpoint(saved(Path(folder, "0"), 20))
            states = [whole_state(run) for run in (before, after)]
            inside.load_checkpoint(saved(Path(folder, "0"), 5))  # inside an accumulation
            assert inside.model_store.waiting is not None
            waiting = layout(inside.backend.paths(inside.model_store.waiting.gradients))
            _compiled.clear()
            # not the weights: the bias in front of the batch norm has gradients of nothing but rounding
            losses = zip(whole["train/loss"], inside.train()["train/loss"], strict=True)
            found[name] = {
                "digests": [digests(before), digests(after)],
                "differ": [path for path in states[0] if states[0][path] != states[1].get(path)],
                "split": split_of(after),
                "waiting": waiting,
                "continued": max(abs(mine - theirs) for mine, theirs in losses),
                "compiled": compilations(inside),
            }
    return found


@case
def killed() -> Found:
    """A run is killed on the mesh, in iteration 18, and another process resumes it from inside an update."""
    with tempfile.TemporaryDirectory() as folder:
        whole = make(ON_MESH, Path(folder, "whole"))
        whole.train()
        died = programs.run("-m", THIS, "victim", cwd=programs.ROOT, env={**os.environ, "FOLDER": folder})
        resumed = make(ON_MESH, Path(folder, "killed"))
        existed = saved(Path(folder, "killed"), 15).exists() and not saved(Path(folder, "killed"), 20).exists()
        resumed.train(resume="latest")
        (check,) = (each.resume_check for each in resumed.handlers if isinstance(each, EventRecorder))
        states = whole_state(resumed), whole_state(whole)
        return {
            "died": died.returncode == -SIGKILL and existed,
            "differ": [path for path in states[1] if states[0].get(path) != states[1][path]],
            "logs": dict(logged(Path(folder, "killed"))) == dict(logged(Path(folder, "whole"))),
            "check": [check.difference, check.agreed > 0],
            "iteration": resumed.state.iteration,
        }


def victim() -> Found:
    run = make(ON_MESH, Path(os.environ["FOLDER"], "killed"))

    @run.on(Events.ITERATION_STARTED)
    def die(engine: Any) -> None:
        if engine.state.iteration == 18:
            os.kill(os.getpid(), SIGKILL)

    run.train()
    raise AssertionError


# ------------------------------------------------------------------------------------------ models and mistakes


@case
def metadata() -> Found:
    """What flax's own metadata says; the pattern of a path comes first."""
    import jax
    from flax import linen, nnx

    found: Found = {}

    def net() -> Any:
        split = nnx.with_partitioning(nnx.initializers.normal(), (None, "model"))
        first = nnx.Linear(4, 8, kernel_init=split, rngs=nnx.Rngs(0))
        return nnx.Sequential(first, nnx.Linear(8, 3, rngs=nnx.Rngs(1)))

    with nnx.use_eager_sharding(False):
        plain = net()
    with jax.set_mesh(jax.make_mesh((2, 2), ("data", "model"), (jax.sharding.AxisType.Auto,) * 2)):
        created = net()  # split already
    assert not created.layers[0].kernel[...].is_fully_replicated
    module = linen.Sequential(
        [
            linen.Dense(8, kernel_init=linen.with_partitioning(linen.initializers.normal(), (None, "model"))),
            linen.Dense(3),
        ]
    )
    models = {
        "nnx": plain,
        "created": created,
        "linen": (module, module.init(jax.random.key(0), jax.numpy.ones((1, 4)))),
    }
    for name, model in models.items():
        for mesh, sharding in (
            ({"data": 2, "model": 2}, "replicated"),
            ({"data": 4}, "replicated"),
            ({"data": 2, "model": 2}, {"*layers_0/kernel" if name == "linen" else "layers/0/kernel": ["model"]}),
        ):
            core = TrainerCore(JaxBackend("cpu", mesh=mesh, sharding=sharding), SupervisedStrategy())
            state = core.init(model, "adamw")
            state = core.train_step(batches(1)[0], state).state
            leaves = core.backend.paths(state.weights["parameters"])
            found[f"{name} {len(mesh)} {sharding}"] = {
                path: str(leaf.sharding.spec) for path, leaf in leaves.items() if "kernel" in path
            }
    return found


@case
def optimizers() -> Found:
    """States that are not all like the parameters: sums over rows and columns, and a mask; each is compiled once."""
    import optax

    made = {
        "adafactor": optax.adafactor(1e-3, min_dim_size_to_factor=2),
        "masked": optax.masked(
            optax.adam(1e-3), {"0.weight": True, "0.bias": True, "2.weight": False, "2.bias": False}
        ),
    }
    found: Found = {}
    for name, optimizer in made.items():
        core = TrainerCore(MESH(), SupervisedStrategy())
        state = core.init(function_model(torch_model().state_dict()), optimizer)
        for batch in batches(3):
            state = core.train_step(batch, state).state
        leaves = core.backend.paths(state.optimizer)
        found[name] = {"programs": counted(core.backend), "split": layout(leaves), "leaves": len(leaves)}
    return found


@case
def conversions() -> Found:
    """Split arrays become torch tensors with the same values, whatever their type."""
    import jax

    backend = JaxBackend(mesh={"data": 2, "model": 2})
    mesh = backend.placement._mesh
    found = {}
    for dtype in ("float32", "bfloat16", "int32", "bool"):
        plain = jax.numpy.arange(32).reshape(4, 8).astype(dtype)
        for spec in (("data", "model"), (None, "model"), (("data", "model"),), ()):
            sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
            tensor = backend.to_torch(jax.device_put(plain, sharding))
            again = backend.from_torch(tensor)
            found[f"{dtype} {spec}"] = [
                str(tensor.dtype) == f"torch.{dtype}",
                bool((tensor.float().numpy() == np.asarray(plain, "float32")).all()),
                backend.owns(again) and bool((again == plain).all()),
            ]
    return found


@case
def mistakes() -> Found:
    """The errors' texts, and what had been trained by then."""
    found: Found = {}

    def refused(name: str, attempt: Callable[[], object]) -> None:
        try:
            attempt()
        except ConfigurationError as error:
            found[name] = str(error)

    refused("too few", lambda: JaxBackend(mesh={"data": 8}))
    refused("number", lambda: JaxBackend("cpu:1", mesh={"data": 2}))
    refused("sizes", lambda: small_run(backend=JaxBackend(mesh={"data": 1, "model": 3}, sharding=SMALL)))
    refused("pattern", lambda: small_run(backend=JaxBackend(mesh={"data": 2}, sharding={"2.kernel": ["data"]})))
    inputs, targets = batches(1)[0]
    first = small_run(data=[(inputs[:7], targets[:7])])
    refused("batch", first.train)
    refused("accumulated", small_run(data=[(inputs[:7], targets[:7])], accumulate=2).train)
    return {**found, "updates": first.state.update}


def main(names: list[str]) -> None:
    import jax.monitoring

    torch.set_num_threads(1)
    warnings.simplefilter("error", UserWarning)  # as of memory that could not be reused

    def listen(event: str, seconds: float, **details: object) -> None:
        if event.endswith("backend_compile_duration"):
            _compiled.append(details.get("fun_name"))

    jax.monitoring.register_event_duration_secs_listener(listen)
    known = {**CASES, "victim": victim}
    print(json.dumps({name: known[name]() for name in names or CASES}))


if __name__ == "__main__":
    main(sys.argv[1:])
