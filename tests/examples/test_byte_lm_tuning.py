"""The parts of examples/byte_lm_tuning: its data, its starting point, and short runs of its scripts."""

from __future__ import annotations

import ast
import math
import re
import textwrap
from pathlib import Path
from types import ModuleType

import pytest
import torch

from examples.byte_lm.model import ByteGPT
from examples.byte_lm_tuning import dpo, grpo, sft
from examples.byte_lm_tuning.functions import Function, functions_in, functions_of_library
from examples.byte_lm_tuning.mutations import KINDS, OPPOSITES, mutate, tokens_of
from examples.byte_lm_tuning.start import load_model, newest_demo_run
from pulsetrain.engine.checkpoint import CheckpointManager
from pulsetrain.engine.errors import CheckpointError
from pulsetrain.engine.recording import EventLog
from tests.support.programs_examples import EXAMPLES, run

pytestmark = pytest.mark.slow

CONTEXT = 128


def read(source: str) -> list[tuple[str, str]]:
    return [(each.signature, each.body) for each in functions_in(textwrap.dedent(source).lstrip("\n"))]


class TestFunctions:
    def test_a_function_is_its_signature_and_its_body(self) -> None:
        source = """
        import os

        def double(x):
            y = x + x

            return y

        double(2)
        """
        assert read(source) == [("def double(x):\n", "    y = x + x\n\n    return y\n")]

    def test_methods_are_dedented(self) -> None:
        source = """
        class A:
            class B:
                def get(self):
                    if self:
                        return 1
        """
        assert read(source) == [("def get(self):\n", "    if self:\n        return 1\n")]

    def test_functions_are_in_the_order_of_their_lines(self) -> None:
        source = """
        def a():
            return 1
        class C:
            def b(self):
                return 2
        try:
            import d
        except ImportError:
            def d():
                return 3
        else:
            def e():
                return 4
        """
        assert [signature for signature, _ in read(source)] == [
            "def a():\n",
            "def b(self):\n",
            "def d():\n",
            "def e():\n",
        ]

    def test_decorators_are_left_out(self) -> None:
        source = """
        @first
        @second(
            1,
        )
        def f():
            return 0
        """
        assert read(source) == [("def f():\n", "    return 0\n")]

    def test_nested_functions_are_not_listed_separately(self) -> None:
        source = """
        def outer():
            @wrapped
            def inner():
                return 1
            return inner
        """
        body = "    @wrapped\n    def inner():\n        return 1\n    return inner\n"
        assert read(source) == [("def outer():\n", body)]

    @pytest.mark.parametrize(
        "docstring",
        ['"""One line."""', '"""One.\n\n    More.\n    """', '"""One."""\n', '"""One."""  # a remark', "'One.'\n\n"],
    )
    def test_docstrings_are_left_out(self, docstring: str) -> None:
        source = f"def f():\n    {docstring}\n    return 1\n"
        assert [(each.signature, each.body) for each in functions_in(source)] == [("def f():\n", "    return 1\n")]

    @pytest.mark.parametrize("source", ['def f():\n    """Alone."""\n', 'def f():\n    """With."""; return 1\n'])
    def test_a_function_of_only_a_docstring_is_left_out(self, source: str) -> None:
        assert functions_in(source) == []

    def test_signatures_may_have_several_lines_and_comments(self) -> None:
        source = """
        class A:
            def f(
                self,
                # the first
                a: dict[str, int] = {"x": 1},
                b=lambda: 0,
            ) -> None:  # the colon's line

                # about the body
                self.a = a
        """
        ((signature, body),) = read(source)
        assert signature.splitlines() == [
            "def f(",
            "    self,",
            "    # the first",
            '    a: dict[str, int] = {"x": 1},',
            "    b=lambda: 0,",
            ") -> None:  # the colon's line",
        ]
        assert body == "    # about the body\n    self.a = a\n"

    def test_comments_with_less_indentation_stay(self) -> None:
        source = """
        class A:
            def f(self):
                a = 1
        # b = 2
                return a
        """
        assert read(source) == [("def f(self):\n", "    a = 1\n    # b = 2\n    return a\n")]

    def test_asynchronous_functions_begin_with_async(self) -> None:
        source = """
        class A:
            async def f(self):
                await self.g()
        """
        assert read(source) == [("async def f(self):\n", "    await self.g()\n")]

    def test_sizes_are_in_bytes_and_include_the_end_token(self) -> None:
        (function,) = functions_in("def größe(é):\n    return '€' + é\n")
        assert function.signature == "def größe(é):\n"
        assert function.body == "    return '€' + é\n"
        assert function.size == len("def größe(é):\n    return '€' + é\n".encode()) + 1 == 40

    def test_a_body_on_the_signatures_line_is_left_out(self) -> None:
        assert functions_in("def f(): return 1\ndef g(a,\n      b): return 2\n") == []

    def test_texts_that_would_change_are_left_out(self) -> None:
        source = 'class A:\n    def f(self):\n        return """\n        moved\n"""\n'
        assert functions_in(source) == []
        ((_, body),) = read('def f():\n    return """\n    stays"""\n')
        assert body == '    return """\n    stays"""\n'

    def test_form_feeds_do_not_end_a_line(self) -> None:
        assert functions_in("x = 1\n\x0c\ndef f():\n    return 1\n")[0].signature == "def f():\n"

    @pytest.mark.parametrize(("longest", "count"), [(31, 1), (30, 0), (None, 1)])
    def test_functions_that_are_too_long_are_left_out(self, longest: int | None, count: int) -> None:
        assert len(functions_in("def f(a):\n    return a + 1000\n", longest=longest)) == count

    def test_the_library_is_split_as_in_the_demo_and_held_out_files_are_not_trained_on(self, tmp_path: Path) -> None:
        for index in range(60):
            own = f"def own():\n    return {index}\n\n"
            (tmp_path / f"module_{index}.py").write_text(own + "def shared(a):\n    return a\n")
        (tmp_path / "module_1.py").write_bytes(b"# coding: latin-1\ndef f():\n    return '\xe9'\n")
        training, held_out = functions_of_library(CONTEXT, tmp_path)
        # the files that tests of the demo's data name
        assert [each.file for each in held_out] == [f"module_{index}.py" for index in (13, 26, 36, 46, 7)]
        assert {each.signature for each in held_out} == {"def own():\n"}
        assert [each.file for each in training if "shared" in each.signature] == ["module_0.py"]
        assert [each.body for each in training if each.file == "module_1.py"] == ["    return 'é'\n"]
        assert functions_of_library(CONTEXT, tmp_path) == (training, held_out)
        with pytest.raises(ValueError, match=r"context=9.*0 functions for training and 0 held out.*raise the context"):
            functions_of_library(9, tmp_path)


@pytest.fixture(scope="module")
def library() -> list[Function]:
    """Every eighth function of the standard library that fits, trained on or held out."""
    training, held_out = functions_of_library(CONTEXT)
    assert min(len(training), len(held_out)) > 50
    return [*training, *held_out][::8]


class TestLibrary:
    def test_each_function_parses_and_fits(self, library: list[Function]) -> None:
        for each in library:
            (definition,) = ast.parse(each.signature + each.body).body
            assert isinstance(definition, (ast.FunctionDef, ast.AsyncFunctionDef))
            assert ast.get_docstring(definition) is None
            assert each.signature.endswith("\n")
            assert each.body.startswith(("    ", "#"))
            assert len((each.signature + each.body).encode()) < CONTEXT

    @pytest.mark.parametrize("kind", KINDS)
    def test_a_mutation_changes_one_token_and_parses(self, library: list[Function], kind: str) -> None:
        changed = 0
        for each in library:
            body = mutate(each, kind, longest=CONTEXT)
            if body is None:
                continue
            changed += 1
            ast.parse(each.signature + body)
            assert len((each.signature + body).encode()) < CONTEXT
            before, after = ([token.text for token in tokens_of(each.signature + text)] for text in (each.body, body))
            ((old, new),) = [pair for pair in zip(before, after, strict=True) if pair[0] != pair[1]]
            if kind == "operator":
                assert OPPOSITES[old] == new
            else:
                assert new in before
        assert changed > 20

    def test_a_seed_decides_the_mutation(self, library: list[Function]) -> None:
        first, again, other = ([mutate(each, "name", seed=seed) for each in library] for seed in (0, 0, 1))
        assert first == again != other


class TestMutations:
    @pytest.mark.parametrize(
        ("before", "after"),
        [
            ("x == 1", "x != 1"),
            ("x is None", "x is not None"),
            ("x  is  not None", "x  is None"),
            ("x not in y", "x in y"),
            ("x <= 1", "x >= 1"),
            ("x and y", "x or y"),
            ("-x", "+x"),
            ("f(*x)", None),  # which no other operator can replace
            ("[a for a in x]", None),
            ("'a == b'  # c < d", None),
            ("f'and{x}or'", None),
        ],
    )
    def test_an_operator_becomes_its_opposite(self, before: str, after: str | None) -> None:
        found = mutate(Function("", "def f(x, y=0 < 1):\n", f"    return {before}\n"), "operator")
        assert found == (None if after is None else f"    return {after}\n")

    def test_a_name_becomes_a_different_name_of_the_function(self) -> None:
        function = Function("", "def get(self):\n", "    return self.x\n")
        found = {mutate(function, "name", seed=seed) for seed in range(60)}
        assert found == {f"    return {text}\n" for text in ("get.x", "x.x", "self.get", "self.self")}

    def test_a_mutation_never_exceeds_the_length_limit(self) -> None:
        function = Function("", "def f(long):\n", "    return 1 + y\n")
        longer, as_long = "    return 1 + long\n", "    return 1 + f\n"
        limits: dict[int | None, set[str | None]] = {
            None: {longer, as_long},
            34: {longer, as_long},
            33: {as_long},
            31: {as_long},
            30: {None},
        }
        for longest, bodies in limits.items():
            assert {mutate(function, "name", longest=longest, seed=seed) for seed in range(20)} == bodies

    def test_a_function_that_cannot_change_has_no_mutation(self) -> None:
        function = Function("", "def f():\n", "    return 1\n")
        assert [mutate(function, kind) for kind in KINDS] == [None, None]

    def test_tokens_know_their_positions(self) -> None:
        source = "def f(é):\n    # nothing\n    return (é is  not 'ü\\\n' and\n        é)\n"
        found = tokens_of(source)
        assert [source[token.begin : token.end] for token in found if "is" not in token.text] == [
            token.text for token in found if "is" not in token.text
        ]
        assert "is not" in [token.text for token in found]


def save(runs: Path, name: str, *models: ByteGPT, best: int = 0) -> Path:
    """A run folder with a checkpoint of each model."""
    manager = CheckpointManager(runs / name / "checkpoints")
    for index, model in enumerate(models):
        manager.save({"model": model.state_dict()}, step=index, is_best=index == best)
    return runs / name


class TestStart:
    def test_training_starts_from_the_best_checkpoint_of_the_newest_demo_run(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        best, last = ByteGPT(), ByteGPT()
        for name in ("byte_lm-9", "byte_lm-10", "byte_lm_sft-11"):
            save(tmp_path / "runs", name, best, last)
        (tmp_path / "runs" / "byte_lm-12").mkdir()  # has no checkpoint
        monkeypatch.chdir(tmp_path)
        model, checkpoint = load_model(context=300)
        assert newest_demo_run() == Path("runs/byte_lm-10")
        assert checkpoint == Path("runs/byte_lm-10/checkpoints/000000000-checkpoint")
        assert torch.equal(model.head.weight, best.head.weight)
        assert model.context == 300

    def test_without_a_best_checkpoint_training_starts_from_the_last(self, tmp_path: Path) -> None:
        first, last = ByteGPT(), ByteGPT()
        model, _ = load_model(save(tmp_path, "other", first, last, best=-1))
        assert torch.equal(model.head.weight, last.head.weight)

    def test_a_model_of_other_sizes_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match=r"embedding\.weight"):
            load_model(save(tmp_path, "other", ByteGPT(width=64)))

    @pytest.mark.parametrize("script", [sft, dpo, grpo])
    def test_without_a_run_the_error_names_the_command_that_makes_one(
        self,
        script: ModuleType,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        monkeypatch.chdir(tmp_path)
        command = "`pulsetrain train examples/byte_lm/config.yaml` makes a run to start from"
        for arguments, what in (
            ([], "runs/byte_lm-*: no run with a checkpoint"),
            (["--start", "nowhere"], "nowhere/checkpoints has no checkpoint"),
        ):
            with pytest.raises(SystemExit) as ended:
                script.main(arguments)
            assert ended.value.code == 2
            assert f"{what}; {command}" in capsys.readouterr().err
        assert list(tmp_path.iterdir()) == [], "it should leave no files"


@pytest.fixture(scope="module")
def demo_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of an untrained model, from which the loss falls fast."""
    torch.manual_seed(0)
    return save(tmp_path_factory.mktemp("runs"), "byte_lm-1", ByteGPT())


def losses_of(folder: Path) -> list[float]:
    events = EventLog(folder).read(engine="trainer", event="iteration_completed")
    return [float(event.output["loss"]) for event in events]


@pytest.mark.slow
class TestScripts:
    def test_sft_learns_to_answer_and_writes_two_samples(self, demo_run: Path, tmp_path: Path) -> None:
        script = ("-m", "examples.byte_lm_tuning.sft", "--start", demo_run, "--functions", 40, "--epochs", 6)
        output = run(EXAMPLES.parent, *script, "--run", tmp_path / "run").output
        text = "\n".join(output)
        assert f"from {demo_run}/checkpoints/000000000-checkpoint: 40 functions to train on, 40 held out" in text
        for name in ("replies", "bodies"):
            found = re.search(rf"^  {name}: (\S+) -> (\S+) nats per byte, ", text, re.MULTILINE)
            assert found is not None, text
            before, after = float(found[1]), float(found[2])
            assert after < 5.0 < 5.4 < before  # a guess among 256 bytes costs 5.55 nats
        assert output.count("sample") == 2
        losses = losses_of(tmp_path / "run")
        assert losses[-1] < losses[0]
        (saved,) = CheckpointManager(tmp_path / "run" / "checkpoints").valid()[-1:]
        assert saved.name.startswith(f"{len(losses):09d}")

    def test_dpo_learns_to_prefer(self, demo_run: Path, tmp_path: Path) -> None:
        script = ("-m", "examples.byte_lm_tuning.dpo", "--start", demo_run, "--functions", 40, "--epochs", 3)
        text = "\n".join(run(EXAMPLES.parent, *script, "--run", tmp_path / "run").output)
        for kind in KINDS:
            form = rf"^  another {kind}: (\S+)% of (\d+), standard error (\S+)%; by (\S+) on average .*: (\S+)\)$"
            found = re.search(form, text, re.MULTILINE)
            assert found is not None, text
            share, pairs, error = float(found[1]) / 100, int(found[2]), float(found[3]) / 100
            assert 1 <= pairs <= 40
            assert share * pairs == pytest.approx(round(share * pairs), abs=0.05)
            assert error == pytest.approx(math.sqrt(share * (1 - share) / pairs), abs=0.001)
            assert float(found[5]) == 0.0
        losses = losses_of(tmp_path / "run")
        assert losses[0] == pytest.approx(math.log(2), abs=1e-4)  # nothing is preferred yet
        assert losses[-1] < losses[0]
        assert CheckpointManager(tmp_path / "run" / "checkpoints").get_latest() is not None

    def test_a_run_folder_is_numbered_and_dpo_starts_from_sft(
        self, demo_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        few = ["--functions", "6", "--epochs", "1"]
        sft.main(["--start", str(demo_run), *few])
        dpo.main(["--start", "runs/byte_lm_sft-1", *few])
        assert sorted(path.name for path in Path("runs").iterdir()) == ["byte_lm_dpo-1", "byte_lm_sft-1"]
