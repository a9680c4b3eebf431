import ignite.metrics
import pytest

from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.engine.metrics import Accuracy, TokenAccuracy, TopKAccuracy, infer_mode, required_mode


class Judged:
    def __init__(self, higher: bool | None) -> None:
        self.higher_is_better = higher


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        *(
            (f"val/{word}", "min")
            for word in ["loss", "perplexity", "kl", "error", "mae", "mse", "rmse", "bits_per_byte"]
        ),
        *(
            (f"val/{word}", "max")
            for word in ["accuracy", "f1", "precision", "recall", "auc", "iou", "bleu", "return", "reward"]
        ),
        ("val/token_accuracy", "max"),
        ("val/Accuracy", "max"),
        ("val/mean_loss", "min"),
        ("val_loss", "min"),
        ("rollout_return", "max"),
        ("loss", "min"),
        ("loss_set/accuracy", "max"),
        ("val/top5", None),
        ("val/accuracy_loss", None),
        ("val/loss_accuracy", None),
        ("val/lossless", None),
        ("val/bits", None),
        ("accuracy/val", None),
    ],
)
def test_the_last_part_of_a_name_says_whether_a_metric_should_fall_or_rise_if_its_words_agree(name, mode):
    assert infer_mode(name) == mode


def test_a_metric_of_ignites_does_not_say_and_its_name_decides():
    metrics = {
        "val/mse": ignite.metrics.MeanSquaredError(),
        "val/top5": ignite.metrics.TopKCategoricalAccuracy(5),
        "val/accuracy": ignite.metrics.Accuracy(),
    }
    assert [infer_mode(name, metrics) for name in metrics] == ["min", None, "max"]


@pytest.mark.parametrize(("higher", "mode"), [(True, "max"), (False, "min"), (None, "min")])
@pytest.mark.parametrize("name", ["val/loss", "val_loss", "val/loss/of_a_class"])
def test_a_metric_object_that_knows_decides_before_the_name(name, higher, mode):
    mode = None if name.endswith("class") and higher is None else mode
    assert infer_mode(name, {"val/loss": Judged(higher), "val/accuracy": Judged(not higher)}) == mode


@pytest.mark.parametrize("kind", [Accuracy, TokenAccuracy, TopKAccuracy])
def test_our_metrics_know_that_they_should_rise(kind):
    assert kind.higher_is_better is True


@pytest.mark.slow  # it is imported
def test_torchmetrics_decide_for_themselves():
    torchmetrics = pytest.importorskip("torchmetrics")
    metrics = {"val/a": torchmetrics.MeanSquaredError(), "val/b": torchmetrics.R2Score(), "val/c": object()}
    assert [infer_mode(name, metrics) for name in metrics] == ["min", "max", None]


@pytest.mark.parametrize("name", ["val/top5", "val/accuracy_loss"])
def test_what_is_not_known_is_asked_for(name):
    with pytest.raises(ConfigurationError, match=r"Here\(mode=None\): .*; pass mode='min' or mode='max'") as caught:
        required_mode("Here", name)
    assert caught.value.arguments == {"mode": None, "metric": name}


def test_a_misspelt_metric_is_corrected_with_the_name_of_its_set():
    with pytest.raises(ConfigurationError, match="did you mean 'val/accuracy'\\?"):
        required_mode("Here", "val/acuracy")
    with pytest.raises(ConfigurationError, match="did you mean 'far/words'\\?"):
        required_mode("Here", "far/wrds", {"words": Accuracy()})
