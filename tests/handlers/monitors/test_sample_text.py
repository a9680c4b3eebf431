"""SampleText: what is written, where, and that nothing else of the run changes."""

import random
import shutil

import numpy as np
import pytest
import torch
from structlog.testing import capture_logs
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pulsetrain import Trainer, TrainingConfig
from pulsetrain.engine import Events, Every, SupervisedStrategy
from pulsetrain.engine.data import rng
from pulsetrain.engine.errors import ConfigurationError, RecordingError, RunFolderError
from pulsetrain.engine.recording.replay.playback import Replay
from pulsetrain.handlers import EMA, EventRecorder, SampleText
from tests.support.engines import make_engine, subscriptions


class Writer(nn.Module):
    """Writes letters that it draws, and draws from every generator there is."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Linear(1, 1)
        self.dropout = nn.Dropout(0.5)
        self.seen = []

    def forward(self, x):
        return self.weight(self.dropout(x))

    def generate(self, prompt, length, temperature=1.0, generator=None):
        self.seen.append((self.training, self.dropout.training, torch.is_grad_enabled(), self.weight.weight.item()))
        drawn = torch.randint(97, 123, (length,), generator=generator)
        global_draws = [random.randrange(10), int(np.random.randint(10)), int(torch.randint(10, ()))]
        return bytes(drawn.tolist()) + "".join(map(str, global_draws)).encode()


def make_engine_with(model):
    engine = make_engine()
    engine.model = model
    return engine


def make_trainer(*handlers, epochs=2):
    torch.manual_seed(0)
    inputs = torch.randn(8, 1)
    data = DataLoader(TensorDataset(inputs, 2 * inputs), batch_size=2)
    config = TrainingConfig(max_epochs=epochs, optimizer="sgd", learning_rate=0.1, schedule=None, seed=0)
    return Trainer(Writer(), data, data, strategy=SupervisedStrategy("mse"), config=config, handlers=list(handlers))


def files(folder):
    return {path.name: path.read_text(encoding="utf-8") for path in sorted((folder / "samples").iterdir())}


def test_each_text_begins_with_its_prompt_and_is_published_and_in_a_file(tmp_path):
    engine = make_engine_with(Writer())
    media = []
    engine.on(Events.MEDIA_LOGGED)(lambda engine, event: media.append((event.iteration, event.payload)))
    SampleText(["ab", "é"], tmp_path, Every(iterations=2), length=5).attach(engine)
    engine.run([0] * 4)
    assert [(at, payload.name, payload.kind) for at, payload in media] == [
        (2, "sample/1", "text"),
        (2, "sample/2", "text"),
        (4, "sample/1", "text"),
        (4, "sample/2", "text"),
    ]
    first, second = media[0][1].value, media[1][1].value
    assert first.startswith("ab")
    assert second.startswith("é")
    assert len(first) == 2 + 5 + 3
    assert first[2:] == second[1:]  # each begins with the seed
    rule = "\n" + "-" * 80 + "\n"
    assert files(tmp_path) == dict.fromkeys(
        ("iteration-00000002.txt", "iteration-00000004.txt"), f"{first}{rule}{second}\n"
    )


def test_the_end_is_written_once_and_a_cadence_of_its_own_is_not_needed(tmp_path):
    engine = make_engine_with(Writer())
    sample = SampleText("a", tmp_path, None, length=3).attach(engine)
    engine.run([0] * 4, max_epochs=2)
    assert list(files(tmp_path)) == ["iteration-00000008.txt"]
    assert len(engine.model.seen) == 1
    assert sample.texts == [files(tmp_path)["iteration-00000008.txt"].rstrip("\n")]


def test_a_run_that_is_repeated_writes_over_repeated_text(tmp_path):
    engine = make_engine_with(Writer())
    SampleText("a", tmp_path, Every(iterations=2), length=3).attach(engine)
    for _ in range(2):
        engine.run([0] * 4)
    assert list(files(tmp_path)) == ["iteration-00000002.txt", "iteration-00000004.txt"]


def test_generating_restores_generators_modes_and_gradients():
    model = Writer()
    model.train()
    model.dropout.eval()  # a part that is frozen
    engine = make_engine_with(model)
    SampleText("a", every=None, length=3).attach(engine)
    before = rng.capture()
    engine.run([0])
    after = rng.capture()
    assert model.seen == [(False, False, False, model.weight.weight.item())]
    assert (model.training, model.weight.training, model.dropout.training) == (True, True, False)
    assert torch.is_grad_enabled()
    assert after["python"]["state"].equal(before["python"]["state"])
    assert after["numpy"]["state"].equal(before["numpy"]["state"])
    assert after["numpy"]["position"] == before["numpy"]["position"]
    assert after["torch"].equal(before["torch"])


def test_a_failing_generate_restores_them_too_and_the_run_continues():
    model = Writer()
    engine = make_engine_with(model)

    def fail(*_, **__):
        torch.rand(3)
        raise ValueError("no such token")

    SampleText("a", every=Every(iterations=1), generate=fail).attach(engine)
    before = torch.get_rng_state()
    with capture_logs() as logs:
        engine.run([0] * 3)
    assert engine.state.iteration == 3
    assert ["ValueError: no such token" in log["error"] for log in logs] == [True]
    assert model.training
    assert torch.get_rng_state().equal(before)


def test_a_trainer_ends_with_the_same_weights_and_writes_with_those_that_it_validates():
    plain, ema = make_trainer(), EMA(decay=0.5)
    sampled = make_trainer(ema, SampleText("a", every=Every(iterations=3), length=3))
    plain.train()
    sampled.train()
    assert torch.equal(sampled.model.weight.weight, plain.model.weight.weight)
    with ema.applied():
        averaged = sampled.model.weight.weight.item()
    assert sampled.model.seen[-1][3] == averaged != sampled.model.weight.weight.item()


def test_a_function_with_tokens_of_its_own_replaces_the_models_method():
    def generate(tokens, length, *, temperature, generator):
        assert isinstance(generator, torch.Generator)
        return [tokens[-1] + 1] * length + [int(temperature * 10)]

    engine = make_engine()
    sample = SampleText(
        "ab",
        every=None,
        length=2,
        temperature=0.5,
        generate=generate,
        encode=lambda text: [ord(each) for each in text],
        decode=lambda tokens: "".join(f"<{token}>" for token in tokens),
    ).attach(engine)
    engine.run([0])
    assert sample.texts == ["ab<99><99><5>"]


def test_tokens_that_are_not_text_need_decode():
    engine = make_engine()
    SampleText("ab", every=None, generate=lambda *_, **__: [1, 2]).attach(engine)
    with capture_logs() as logs:
        engine.run([0])
    assert "returned list, not text or bytes; pass decode=" in logs[0]["error"]


def test_a_text_cannot_steer_the_terminal(tmp_path):
    engine = make_engine()
    sample = SampleText("def ", tmp_path, None, generate=lambda *_, **__: b"f():\n\x1b[2J\r\xff\xc3\xa9").attach(engine)
    assert sample.summary() == ""
    engine.run([0])
    assert sample.summary() == "sample\n    def f():\n    \\x1b[2J\\r\\xffé"
    assert (tmp_path / "samples" / "iteration-00000001.txt").read_bytes() == b"def f():\n\x1b[2J\r\\xff\xc3\xa9\n"


def test_detached_it_writes_nothing(tmp_path):
    engine = make_engine_with(Writer())
    sample = SampleText("a", tmp_path).attach(engine)
    sample.detach()
    assert subscriptions(engine.bus) == {}
    engine.run([0])
    assert files(tmp_path) == {}


def test_a_model_without_generate_and_a_bad_folder_are_refused(tmp_path):
    with pytest.raises(
        ConfigurationError, match=r"the model of 'trainer', NoneType, has no\s+generate.*pass generate="
    ):
        SampleText("a").attach(make_engine())
    with pytest.raises(ConfigurationError, match="Linear, has no"):
        SampleText("a").attach(make_engine_with(nn.Linear(1, 1)))
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(RunFolderError, match=r"SampleText\(folder=.*cannot be written"):
        SampleText("a", tmp_path / "file").attach(make_engine_with(Writer()))
    recorder = EventRecorder(tmp_path / "run")
    make_trainer(recorder).train()
    recorder.detach()
    with pytest.raises(RecordingError, match="weights"):
        SampleText("a").attach(Replay(tmp_path / "run"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompts": ""}, r"prompts=''\): needs a text"),
        ({"prompts": []}, r"prompts=\[\]\): needs"),
        ({"prompts": ["a", 3]}, r"prompts=\['a', 3\]\): needs"),
        ({"length": 0}, r"length=0\): needs a whole number of at least 1"),
        ({"temperature": -1.0}, r"temperature=-1.0\): needs a finite number"),
        ({"temperature": float("nan")}, r"temperature=nan\): needs"),
        ({"seed": -1}, r"seed=-1\): needs a whole number"),
    ],
)
def test_wrong_arguments_are_refused_when_constructing(arguments, message):
    with pytest.raises(ConfigurationError, match=rf"SampleText\({message}"):
        SampleText(**{"prompts": "a", **arguments})


@pytest.mark.parametrize("arguments", [{"every": 5}, {"generate": "model"}, {"encode": 1}, {"decode": 1}])
def test_values_of_the_wrong_type_are_refused(arguments):
    with pytest.raises(TypeError, match=r"SampleText\("):
        SampleText("a", **arguments)


class Parrot(nn.Module):
    """Continues a text; each of its calls has another shape."""

    def __init__(self):
        super().__init__()
        self.embedding, self.out = nn.Embedding(256, 8), nn.Linear(8, 256)

    def forward(self, tokens):
        return self.out(self.embedding(tokens))

    def generate(self, prompt, length, *, temperature, generator):
        text = list(prompt)
        for _ in range(length):
            text.append(int(self(torch.tensor([text]))[0, -1].argmax()))
        return bytes(text[len(prompt) :])


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on the CPU")
def test_a_compiled_model_is_not_compiled_again_for_each_length():
    from torch._dynamo.utils import counters

    model, tokens = Parrot(), torch.randint(256, (4, 8))
    sample = SampleText("ab", every=None, length=20, temperature=0)
    counters.clear()
    Trainer(
        model,
        [(tokens, tokens)] * 2,
        strategy=SupervisedStrategy(lambda logits, targets: logits.flatten(0, 1).logsumexp(-1).mean()),
        config=TrainingConfig(max_epochs=1, seed=0, device="cpu", compile=True, progress=False),
        handlers=[sample],
    ).train()
    assert len(sample.texts) == 1
    assert counters["stats"]["unique_graphs"] == 1  # the training step's
