"""examples/byte_lm_tuning/grpo.py: what counts as good Python, and that rewarded texts become likelier."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.byte_lm.data import ByteTokenizer
from examples.byte_lm.model import ByteGPT
from examples.byte_lm_tuning import functions, grpo, rewards
from examples.byte_lm_tuning.functions import END, Function, prompts_of_library
from examples.byte_lm_tuning.rewards import form, reward_of, succeeds, success
from examples.byte_lm_tuning.start import CONTEXT
from examples.byte_lm_tuning.statements import parse, reachable, sensible_statements
from pulsetrain.engine.checkpoint import CheckpointManager
from pulsetrain.engine.recording import EventLog
from tests.support.programs_examples import EXAMPLES, run

pytestmark = pytest.mark.slow

DEF = "def f(self, a):\n"


def text_of(prompt: bytes, completion: list[int]) -> str:
    """The text that the rewards score, of tokens as the model writes them."""
    decode = ByteTokenizer().decode
    ended = completion[:-1] if completion[-1] == END else completion
    return rewards.text_of(decode(list(prompt)), decode(ended), completion)


class TestTexts:
    def test_a_finished_text_is_kept_whole(self) -> None:
        assert text_of(b"def f():\n", [*b"  x\n  y", END]) == "def f():\n  x\n  y"

    def test_a_truncated_text_ends_with_its_last_whole_line(self) -> None:
        assert text_of(b"def f():\n", list(b"  x\n  y")) == "def f():\n  x\n"
        assert text_of(b"def f():\n", list(b"  x")) == "def f():\n"
        assert text_of(b"def ", list(b"f(): ")) == ""

    def test_bytes_that_are_not_text_do_not_parse(self) -> None:
        text = text_of(b"def f():\n", [*b" return \xff\xc3", END])
        assert parse(text) is None
        assert parse(text.replace("\ufffd", "")) is not None


class TestSuccess:
    @pytest.mark.parametrize(
        "text",
        [
            DEF + "  x\n  return a\n",
            DEF + "  pass\n  pass\n",  # silly, and yet it parses
            DEF + "  if a:\n    return\n",
            DEF + "  '\\d'\n  return\n",  # a warning at most
            "a\nb\nc\n",
        ],
    )
    def test_three_statements_that_parse_are_a_success(self, text: str, recwarn: pytest.WarningsRecorder) -> None:
        assert succeeds(text)
        assert not recwarn.list

    @pytest.mark.parametrize(
        "text",
        [
            "",
            DEF,
            DEF + "  return a\n",
            DEF + "  # x\n  return a\n",
            DEF + "  x\n  return (a\n",
            DEF + "  x\n    y\n  return a\n",
            DEF + "  x\n  y\n  \0\n",
            "(" * 5000 + ")" * 5000 + "\nx\ny\n",
        ],
    )
    def test_anything_less_is_not_a_success(self, text: str) -> None:
        assert not succeeds(text)


class TestRewards:
    @pytest.mark.parametrize(
        ("body", "count"),
        [
            ("  self.a = a\n", 1),
            ("  return a\n", 0),  # nor does any statement that leaves its block
            ("  pass\n  pass\n  pass\n", 1),
            ("  x = a\n  x = a\n  print(x)\n", 2),
            ("  a = 1\n  return a\n  x = 1\n", 1),  # the rest is never reached
            ("  if a:\n    return 1\n  a()\n", 2),
            ("  while a:\n    break\n    a = 1\n  a = 2\n", 2),
            ("  try:\n    self.x()\n  except OSError:\n    raise\n    self.y()\n  finally:\n    self.z()\n", 3),
            ("  self.x(selv)\n", 0),
            ("  self.anything.at_all()\n  print(len(a))\n", 2),
            ("  for x in a:\n    print(x, y)\n", 0),  # the loop holds the unknown name, too
            ("  [b for b in a]\n  lambda c: c\n", 2),
        ],
    )
    def test_sensible_statements_are_counted(self, body: str, count: int) -> None:
        tree = parse(DEF + body)
        assert tree is not None
        assert sensible_statements(tree) == count

    def test_reachable_statements_are_in_order(self) -> None:
        tree = parse(
            DEF + "  if a:\n    return\n    b\n  else:\n    c\n  match a:\n    case 1:\n      d\n  return\n  e\nf\n"
        )
        assert tree is not None
        found = [statement.lineno for statement in reachable(tree)]
        assert found == [1, 2, 3, 6, 7, 9, 10, 12]

    @pytest.mark.parametrize(
        ("body", "reward"),
        [
            ("", 0.0),
            ("  x = (\n", 0.0),
            ("  return a\n", 1 / 2),
            ("  x = a\n", (1 + 1 / 3) / 2),
            ("  x = a\n  y = (\n", (2 / 3 + 1 / 3) / 2),
            ("  x = a\n  y = x\n  print(y)\n", 1.0),
            ("  x = a\n  y = x\n  z = y\n  w = x\n", 1.0),
            ("  x = a\n  y = x\n  z = y\n   w = x\n", (4 / 5 + 1) / 2),
            ("  pass\n  pass\n  pass\n", (1 + 1 / 3) / 2),
            ("  q = r\n  s = t\n  u = v\n", 1 / 2),
        ],
    )
    def test_a_reward_combines_shares_of_lines_and_statements(self, body: str, reward: float) -> None:
        assert reward_of(DEF + body) == pytest.approx(reward)

    def test_an_empty_text_has_reward_zero(self) -> None:
        assert reward_of("") == 0.0

    def test_each_text_has_one_reward(self) -> None:
        texts = ["  x = a\n  x", "  x = a\n x"]
        found = form([DEF] * 2, texts, [[*texts[0].encode()], [*texts[1].encode(), END]])
        assert found == pytest.approx([(1 + 1 / 3) / 2, (2 / 3 + 1 / 3) / 2])
        assert success([DEF] * 2, ["  a\n  b\n", "  a\n"], [[END]] * 2) == [1.0, 0.0]


def test_held_out_prompts_are_short_and_never_trained_on(monkeypatch: pytest.MonkeyPatch) -> None:
    longest = "def " + "f" * 32 + "():\n"
    assert len(longest) == CONTEXT - grpo.WRITTEN
    a, b, c = (f"def {name}():\n" for name in "abc")
    training = [Function("a.py", signature, "  x\n") for signature in (a, b, a, longest)]
    held_out = [Function("b.py", signature, "  y\n") for signature in (c, b, longest.replace("f", "g"), "f" + longest)]
    monkeypatch.setattr(functions, "functions_of_library", lambda context: (training, held_out))
    prompts = prompts_of_library(CONTEXT, CONTEXT - grpo.WRITTEN)
    assert prompts == ([a, b, longest], [c, longest.replace("f", "g")])


@pytest.fixture(scope="module")
def demo_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of an untrained model."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("runs") / "byte_lm-1"
    CheckpointManager(folder / "checkpoints").save({"model": ByteGPT().state_dict()}, step=0)
    return folder


@pytest.mark.slow
class TestScript:
    def test_what_is_rewarded_becomes_likelier(
        self, demo_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def is_ascii(completion_ids: list[list[int]]) -> list[float]:
            return [sum(token < 128 for token in each) / len(each) for each in completion_ids]

        prompts: Any = [DEF], ["def g():\n"]
        monkeypatch.setattr(grpo, "WRITTEN", 8)
        monkeypatch.setattr(grpo, "form", is_ascii)
        monkeypatch.setattr(grpo, "prompts_of_library", lambda context, longest: prompts)
        history = grpo.main(
            ["--start", str(demo_run), "--run", str(tmp_path / "run"), "--rollouts", "10", "--samples", "8"]
        )
        reached, divergences = history["rollout/reward"], history["rollout/reference_kl"]
        assert len(reached) == len(divergences) == 10
        assert reached[0] == pytest.approx(0.5, abs=0.1)  # of random bytes
        assert reached[-1] > reached[0] + 0.1
        assert divergences[0] == 0.0 < 0.01 < divergences[-1]
        output = capsys.readouterr().out
        assert re.findall(r"^rollout (\d+): reward 0\.\d{3}, KL ", output, re.MULTILINE) == ["5", "10"]
        saved = CheckpointManager(tmp_path / "run" / "checkpoints").valid()
        assert [path.name for path in saved] == ["000000020-checkpoint"]

    def test_it_runs_as_the_page_says(self, demo_run: Path, tmp_path: Path) -> None:
        script = ("-m", "examples.byte_lm_tuning.grpo", "--start", demo_run, "--rollouts", 1, "--samples", 5)
        output = run(EXAMPLES.parent, *script, "--run", tmp_path / "run").output
        start = rf"from {demo_run}/checkpoints/000000000-checkpoint: \d+ prompts to train on, \d+ held out"
        assert re.fullmatch(rf"{start}; run folder \S+/run", output[0])
        *_, before, after, divergence = output
        assert before == "before: 0.0% +- 0.0% of 5 texts for held-out prompts succeed"
        assert after == "after: 0.0% +- 0.0% of 5 texts for held-out prompts succeed"
        assert divergence == "KL to the start, in the last rollout: 0.000 nats per byte"
        events = EventLog(tmp_path / "run").read(event="rollout_completed")
        (length,) = [event.payload["metrics"]["rollout/length"] for event in events]
        assert 60 < length < grpo.WRITTEN  # one byte in 256 ends a text
