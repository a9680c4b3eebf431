"""JaxBackend on several devices: the numbers of one device, one compilation, and checkpoints that fit any mesh."""

import pytest

from pulsetrain.engine import ConfigurationError, JaxBackend
from pulsetrain.engine.step.protocols import BackendSettings

pytest.importorskip("jax", reason="pip install 'pulsetrain[jax]'")
pytest.importorskip("optax", reason="pip install 'pulsetrain[jax]'")
pytest.importorskip("flax", reason="pip install 'pulsetrain[jax]'")

import jax

from tests.support.jax_mesh_cases import WAYS, on_four_devices
from tests.support.models import batches, bits, core_of, function_model, torch_model
from tests.support.runs_backends import programs_kept

# the axes of each kernel, and the shape of its part on each device; in and between are (64, 256) and (256, 128)
SPLIT = {
    "data": {},
    "fsdp": {"between/kernel": ["P('data',)", [64, 128]], "in/kernel": ["P(None, 'data')", [64, 64]]},
    "tensor": {
        "between/kernel": ["P(None, 'model')", [256, 32]],
        "in/bias": ["P('model',)", [64]],
        "in/kernel": ["P(None, 'model')", [64, 64]],
        "out/kernel": ["P('model', None)", [32, 4]],
    },
    "both": {
        "between/kernel": ["P('data',)", [128, 128]],  # as fsdp does
        "in/bias": ["P('model',)", [128]],
        "in/kernel": ["P(None, 'model')", [64, 128]],
        "out/kernel": ["P('model', None)", [64, 4]],
    },
}


@pytest.fixture(scope="module", autouse=True)
def _programs_kept():
    with programs_kept():
        yield


# ------------------------------------------------------------------------------------------- the same numbers


@pytest.fixture(scope="module", params=["float32", "float64"])
def numbers(request):
    """Differences to one device after 50 steps with AdamW, clipping, weight decay and dropout."""
    wide = {"JAX_ENABLE_X64": "1"} if request.param == "float64" else {}
    return request.param, on_four_devices("numbers", **wide)["numbers"]


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_losses_norms_and_weights_are_those_of_one_device(numbers, way):
    dtype, found = numbers
    bound = {"float32": 1e-5, "float64": 1e-12}[dtype]
    assert max(found[way][name] for name in ("loss", "norm", "weights")) <= bound
    losses = found["one"]["losses"]
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5]), "it learns, or equal losses would say little"
    assert min(found["one"]["norms"]) > 0.5, "each update is clipped"


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_fifty_steps_are_compiled_once(numbers, way):
    assert numbers[1][way]["compiled"] == {"train": [1, 1]}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_parameters_and_their_moments_are_split_alike_and_stay_so(numbers, way):
    found = numbers[1][way]
    assert found["devices"] == 4
    expected = {
        f"{place}/{path}": layout
        for place in ("0", "1/inner_state/0/mu", "1/inner_state/0/nu")
        for path, layout in SPLIT[way].items()
    }
    assert found["split"] == expected


# --------------------------------------------------------------------------------------------- compilations


@pytest.fixture(scope="module")
def small():
    names = ("programs_of_runs", "smaller_batch", "batches_split", "split_steps", "metadata", "optimizers", "averages")
    return on_four_devices(*names)


WHOLE = {"train": [1, 1], "evaluate": [1, 1]}
IN_PARTS = {"gradients": [1, 1], "finish": [1, 1], "apply": [1, 1], "evaluate": [1, 1]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("run", "programs"),
    [
        ("plain", WHOLE),
        ("clipping", WHOLE),
        ("written", WHOLE),  # weights are written between two epochs
        ("finder", WHOLE),  # steps are rolled back
        ("guard", IN_PARTS),
        ("accumulation", {**IN_PARTS, "gradients": [2, 2]}),  # the first batch of an update is added to nothing
    ],
)
def test_a_run_with_validation_compiles_each_program_once(small, run, programs):
    found = small["programs_of_runs"][run]
    assert found["programs"] == programs
    assert found["xla"] == sum(count for count, _ in programs.values())
    assert [each.partition(" ")[0] for each in found["split"]] == [
        f"{place}/{path}"
        for place in ("0", "1/inner_state/0/mu", "1/inner_state/0/nu")
        for path in ("0.weight", "2.weight")
    ]


@pytest.mark.slow
def test_a_model_with_keys_and_statistics_is_compiled_once(small):
    """A program's cache may have two entries for it: jax describes the place of a key that is returned differently."""
    found = small["programs_of_runs"]["nnx"]
    assert {kind: count for kind, (count, _) in found["programs"].items()} == {"train": 1, "evaluate": 1}
    assert found["xla"] == 2
    assert found["published"] < 1e-6, "the module itself has the trained weights"


@pytest.mark.slow
def test_a_smaller_last_batch_is_computed_by_all_devices_and_compiled_once(small):
    found = small["smaller_batch"]
    assert found["compiled"]["programs"] == {"train": [2, 2], "evaluate": [1, 1]}
    assert found["compiled"]["xla"] == 3
    assert found["samples"] == [2 * (16 + 16 + 7)] * 2
    assert found["difference"] < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("step", ["train", "evaluate", "call"])
def test_each_device_computes_its_rows_of_a_batch_that_divides(small, step):
    assert small["batches_split"][f"{step} 16"] == ["(8, 4)"]
    assert small["batches_split"][f"{step} 7"] == ["(16, 4)"], "all rows"


@pytest.mark.slow
def test_an_average_of_late_weights_is_that_of_one_device(small):
    found = small["averages"]
    assert found["difference"] < 1e-6
    assert found["mesh"]["count"] == found["one"]["count"] == 2
    assert found["mesh"]["losses"] == pytest.approx(found["one"]["losses"], abs=1e-6)
    assert found["mesh"]["moved"] > 1e-3, "the average is not the last weights"
    assert found["mesh"]["split"]


@pytest.mark.slow
@pytest.mark.parametrize("way", [*WAYS, "partly"])
def test_receivers_of_gradients_change_no_bit(small, way):
    found = small["split_steps"][way]
    assert found["equal"]
    assert found["split"], "gradients are split as their parameters are"
    assert all(whole == parts > 0.1 for whole, parts in found["norms"])


@pytest.mark.slow
def test_other_optimizers_are_compiled_once_and_split_where_they_resemble_a_parameter(small):
    masked = small["optimizers"]["masked"]
    assert [each.rpartition("/")[2] for each in masked["split"]] == ["0.weight P('model', None)"] * 2
    assert small["optimizers"]["adafactor"]["split"] == [], "its sums over rows and columns"
    for found in small["optimizers"].values():
        assert found["programs"] == {"train": [1, 1]}
        assert found["leaves"] > len(found["split"])


# ---------------------------------------------------------------------------------------------------- models


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "layer"), [("nnx", "layers/{}/kernel"), ("created", "layers/{}/kernel"), ("linen", "layers_{}/kernel")]
)
def test_the_metadata_of_flax_says_what_is_split(small, kind, layer):
    replicated, by_metadata = {"P()", "P(None, None)"}, "P(None, 'model')"
    both, data, by_pattern = (found for name, found in small["metadata"].items() if name.startswith(kind))
    assert both[layer.format(0)] == by_metadata
    assert data[layer.format(0)] in replicated, "a mesh without the axis"
    assert by_pattern[layer.format(0)] == "P('model',)", "a pattern comes first"
    assert {found[layer.format(1)] for found in (both, data, by_pattern)} <= replicated


def test_split_arrays_become_torch_tensors_one_row_is_for_all_and_wrong_sizes_are_refused_before_training():
    found = on_four_devices("conversions", "mistakes", "one_row")
    assert len(found["conversions"]) == 16
    assert all(all(checks) for checks in found["conversions"].values()), found["conversions"]
    rows = found["one_row"]
    assert rows["losses"]["mesh"] == pytest.approx(rows["losses"]["one"], rel=1e-6)
    assert (rows["inputs"], rows["positions"], rows["scale"], rows["alone"]) == ([8, 4], [1, 4], [], [1, 4])
    errors = found["mistakes"]
    assert errors.pop("updates") == 0
    first = (
        "JaxBackend(mesh={'data': 2, 'model': 2}): the first batch has 7 rows, which do not divide by data=2; choose "
    )
    assert errors == {
        "too few": (
            "JaxBackend(mesh={'data': 8}): needs 8 devices, and jax finds 4 of kind 'cpu'; set XLA_FLAGS=--xla_force_"
            "host_platform_device_count=8 in the environment, or call jax.config.update('jax_num_cpu_devices', 8) "
            "before jax is first used"
        ),
        "number": "device='cpu:1': a mesh uses the first devices of a kind; leave the number out",
        "sizes": (
            "JaxBackend(sharding={'0.weight': ['model', None]}): dimension 0 of the parameter '0.weight' of shape (8, "
            "4) does not divide by model=3; choose a size that does, split another dimension, or leave it out of the "
            "pattern"
        ),
        "pattern": (
            "JaxBackend(sharding={'2.kernel': ['data']}): matches none of the model's 4 parameters, such as '0.bias', "
            "'0.weight', '2.bias'"
        ),
        "batch": first + "a batch size that is a multiple of 2",
        "accumulated": first + "a batch size that is a multiple of 2",
    }


# ------------------------------------------------------------------------------------------------ whole runs


@pytest.fixture(scope="module")
def runs():
    return on_four_devices("checkpoints", "killed")


@pytest.mark.slow
@pytest.mark.parametrize("way", ["to one", "to mesh"])
def test_a_checkpoint_fits_one_device_and_a_mesh(runs, way):
    found = runs["checkpoints"][way]
    assert found["digests"][0] == found["digests"][1], "of weights, buffers and the optimizer's state"
    assert not [path for path in found["differ"] if path.startswith(("model", "optimizer", "stepper", "handlers/EMA"))]
    split = ["first/kernel P(None, 'model')", "last/kernel P('model', None)"] if way == "to mesh" else []
    assert found["waiting"] == split, "gradients of an update that is not complete"
    moments = ("1/inner_state/0/mu", "1/inner_state/0/nu")
    assert found["split"] == sorted(f"{place}/{each}" for place in ("0", *moments) for each in split)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["to one", "to mesh"])
def test_a_run_continues_on_other_devices_with_the_same_losses(runs, way):
    found = runs["checkpoints"][way]
    assert found["continued"] < 1e-5
    counts = {kind: count for kind, (count, _) in found["compiled"]["programs"].items()}
    assert counts == {"gradients": 2, "finish": 1, "apply": 1, "evaluate": 1}
    assert found["compiled"]["xla"] == sum(counts.values())


@pytest.mark.slow
def test_a_killed_run_resumes_on_the_mesh_bit_for_bit(runs):
    found = runs["killed"]
    assert found["died"]
    assert found["iteration"] == 30
    assert found["differ"] == []
    assert found["logs"]
    assert found["check"] == [None, True]


# ------------------------------------------------------------------------------------------ in this process


def test_a_mesh_of_one_device_has_its_bits():
    """The same code as on several devices, with nothing to split."""
    found = []
    for way in ({}, {"mesh": {"data": 1, "model": 1}, "sharding": {"*.weight": [None, "model"]}}):
        core = core_of(clip_grad_norm=0.1)
        core.backend = JaxBackend("cpu", **way)
        core.backend.configure(BackendSettings(device="cpu", clip_grad_norm=0.1))
        state = core.init(function_model(torch_model().state_dict()), "adamw")
        for batch in batches(2):
            result = core.train_step(batch, state)
            state = result.state
        found.append((float(result.loss), bits(core.backend, core.backend.copied(state))))
        assert core.backend.compiled["train"] == 1
    assert found[0] == found[1]
    described = {"jax_mesh": "data=1, model=1", "jax_sharding": "{'*.weight': [None, 'model']}"}
    assert described.items() <= core.backend.environment().items()
    assert "jax_mesh" not in JaxBackend("cpu").environment()


def test_too_few_devices_are_refused_with_the_remedy():
    with pytest.raises(
        ConfigurationError, match=r"mesh={'data': 2, 'model': 2}\): needs 4 devices, and jax finds 1 of ki"
    ) as e:
        JaxBackend("cpu", mesh={"data": 2, "model": 2})
    assert "set XLA_FLAGS=--xla_force_host_platform_device_count=4" in str(e.value)
    assert e.value.argument == "mesh"


def test_a_sharding_needs_a_mesh():
    with pytest.raises(
        ConfigurationError, match=r"JaxBackend\(sharding='fsdp'\): needs a mesh, such as mesh={'data': 2}"
    ):
        JaxBackend("cpu", sharding="fsdp")


def test_several_processes_of_jax_are_refused(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ConfigurationError, match=r"jax.distributed has joined 2 processes, and this backend uses"):
        JaxBackend("cpu")
