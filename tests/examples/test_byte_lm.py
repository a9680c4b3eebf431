"""The parts of examples/byte_lm: the model and its data."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from examples.byte_lm.data import VALIDATION_BATCH_SIZE, ByteWindows, loaders, standard_library
from examples.byte_lm.model import ByteGPT, rotate

CONTEXT = 16


@pytest.fixture
def model() -> ByteGPT:
    torch.manual_seed(0)
    return ByteGPT(layers=2, width=32, heads=2, context=CONTEXT)


def random_bytes(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(1))


def taken_gradients(model: ByteGPT) -> dict[str, Tensor]:
    """The gradients, removed from the model."""
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert len(gradients) == len(list(model.parameters()))
    model.zero_grad()
    return gradients


class TestModel:
    @pytest.mark.parametrize("length", [1, CONTEXT // 2, CONTEXT])
    def test_it_scores_every_byte_at_every_position(self, model: ByteGPT, length: int) -> None:
        assert model(random_bytes(3, length)).shape == (3, length, 256)

    def test_no_position_sees_what_follows_it(self, model: ByteGPT) -> None:
        tokens = random_bytes(1, CONTEXT)
        before = model(tokens)
        for position in range(CONTEXT):
            changed = tokens.clone()
            changed[0, position] = (changed[0, position] + 1) % 256
            after = model(changed)
            torch.testing.assert_close(after[:, :position], before[:, :position], rtol=0, atol=1e-6)
            assert (after[:, position:] - before[:, position:]).abs().amax(-1).gt(1e-6).all()

    def test_it_knows_nothing_before_training(self, model: ByteGPT) -> None:
        tokens = random_bytes(8, CONTEXT)
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        assert loss.item() == pytest.approx(math.log(256), abs=0.1)

    def test_it_memorises_a_text(self, model: ByteGPT) -> None:
        text = b"def spam(eggs):\n"
        tokens = torch.tensor([list(text)])
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        for _ in range(60):
            optimizer.zero_grad()
            F.cross_entropy(model(tokens[:, :-1])[0], tokens[0, 1:]).backward()
            optimizer.step()
        assert model.generate(text[:1], len(text) - 1, temperature=0.0) == text[1:]

    def test_every_parameter_takes_part(self, model: ByteGPT) -> None:
        model(random_bytes(2, CONTEXT)).square().mean().backward()
        assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []

    def test_it_saves_only_parameters(self, model: ByteGPT) -> None:
        assert model.state_dict().keys() == dict(model.named_parameters()).keys()

    @pytest.mark.parametrize(
        ("sizes", "message"),
        [
            ({"layers": 0}, r"ByteGPT\(layers=0\): must be at least 1"),
            ({"width": -8}, r"ByteGPT\(width=-8\): must be at least 1"),
            ({"context": 0}, r"ByteGPT\(context=0\): must be at least 1"),
            ({"width": 63, "heads": 4}, r"ByteGPT\(width=63, heads=4\): .*choose a multiple of 8"),
            ({"width": 12, "heads": 4}, r"ByteGPT\(width=12, heads=4\): .*even sizes"),
            ({"dropout": 1.0}, r"ByteGPT\(dropout=1.0\)"),
            ({"dropout": math.nan}, r"ByteGPT\(dropout=nan\)"),
        ],
    )
    def test_sizes_that_do_not_fit_are_refused(self, sizes: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            ByteGPT(**sizes)

    @pytest.mark.parametrize("shape", [(CONTEXT,), (1, CONTEXT + 1), (1, 1, 1)])
    def test_tokens_of_another_shape_are_refused(self, model: ByteGPT, shape: tuple[int, ...]) -> None:
        rule = rf"input_ids of shape .*needs \(batch, length\), length at most {CONTEXT}"
        with pytest.raises(ValueError, match=rule):
            model(input_ids=random_bytes(*shape))


def positions(*rows: list[int]) -> Tensor:
    """Each row as the lengths of its documents."""
    return torch.tensor([[place for length in row for place in range(length)] for row in rows])


class TestDocuments:
    @pytest.mark.parametrize(
        "rows",
        [
            [[CONTEXT]],
            [[5, 11]],
            [[1, 14, 1]],
            [[1] * CONTEXT],
            [[2, 2, 12], [7, 9], [16], [3, 1, 3, 1, 3, 1, 4]],
            [[3, 4], [1, 6]],
        ],
    )
    def test_each_document_is_read_as_if_alone(self, model: ByteGPT, rows: list[list[int]]) -> None:
        position_ids = positions(*rows)
        tokens, weights = random_bytes(*position_ids.shape), torch.randn(*position_ids.shape, 256)
        logits = model(input_ids=tokens, position_ids=position_ids)
        (logits * weights).mean().backward()
        gradients = taken_gradients(model)

        lengths = [length for row in rows for length in row]
        alone = [model(document[None])[0] for document in tokens.flatten().split(lengths)]
        torch.testing.assert_close(logits.flatten(0, 1), torch.cat(alone), rtol=0, atol=1e-6)
        (torch.cat(alone) * weights.flatten(0, 1)).mean().backward()
        for name, gradient in taken_gradients(model).items():
            torch.testing.assert_close(gradients[name], gradient, rtol=0, atol=1e-6, msg=name)

    def test_a_row_may_begin_inside_a_document(self, model: ByteGPT) -> None:
        tokens, places = random_bytes(1, 9), torch.tensor([[4, 5, 6, 0, 1, 2, 3, 9, 10]])
        logits = model(tokens, places)
        apart = [model(tokens[:, part], places[:, part]) for part in (slice(0, 3), slice(3, 7), slice(7, 9))]
        torch.testing.assert_close(logits, torch.cat(apart, dim=1), rtol=0, atol=1e-6)

    def test_no_document_sees_another(self, model: ByteGPT) -> None:
        tokens, position_ids = random_bytes(1, CONTEXT), positions([4, 7, 5])
        before, changed = model(tokens, position_ids), tokens.clone()
        changed[0, 4] = (changed[0, 4] + 1) % 256  # where the second begins
        is_other = (model(changed, position_ids) - before).abs().amax(-1)[0] > 1e-7
        assert is_other.tolist() == [4 <= place < 11 for place in range(CONTEXT)]

    def test_without_positions_each_row_is_one_document(self, model: ByteGPT) -> None:
        tokens = random_bytes(3, CONTEXT)
        given = model(tokens, torch.arange(CONTEXT).expand(3, -1))
        torch.testing.assert_close(given, model(tokens), rtol=0, atol=1e-6)

    @pytest.mark.parametrize("shape", [(CONTEXT,), (1, CONTEXT), (2, CONTEXT - 1)])
    def test_positions_that_do_not_fit_the_tokens_are_refused(self, model: ByteGPT, shape: tuple[int, ...]) -> None:
        rule = rf"position_ids of shape \({shape[0]},.*needs \(2, {CONTEXT}\), as input_ids"
        with pytest.raises(ValueError, match=rule):
            model(random_bytes(2, CONTEXT), torch.zeros(shape, dtype=torch.int64))


class TestRotaryPositions:
    @staticmethod
    def rotated(x: Tensor) -> Tensor:
        """x (features,) at each position, shape (positions, features)."""
        gpt = ByteGPT(layers=1, width=len(x), heads=1, context=CONTEXT)
        return rotate(x.expand(CONTEXT, -1), gpt.cos, gpt.sin)

    def test_rotation_keeps_lengths(self) -> None:
        x = torch.randn(8, generator=torch.Generator().manual_seed(0))
        torch.testing.assert_close(self.rotated(x).norm(dim=-1), x.norm().expand(CONTEXT))

    def test_a_dot_product_depends_only_on_the_distance(self) -> None:
        generator = torch.Generator().manual_seed(0)
        queries = self.rotated(torch.randn(8, generator=generator))
        keys = self.rotated(torch.randn(8, generator=generator))
        products = queries @ keys.T
        torch.testing.assert_close(products[1:, 1:], products[:-1, :-1], rtol=1e-4, atol=1e-5)
        assert not torch.allclose(products[0], products[0, 0])


class TestGenerate:
    def test_it_generates_any_number_of_bytes_even_beyond_the_context(self, model: ByteGPT) -> None:
        assert [len(model.generate(b"x", length)) for length in (0, 1, 2 * CONTEXT)] == [0, 1, 2 * CONTEXT]

    def test_a_generator_decides_the_sample(self, model: ByteGPT) -> None:
        first, again, other = (model.generate(b"x", 20, generator=torch.Generator().manual_seed(s)) for s in (1, 1, 2))
        assert first == again != other

    def test_temperature_0_takes_the_likeliest_byte(self, model: ByteGPT) -> None:
        likeliest = int(model(torch.tensor([list(b"def")]))[0, -1].argmax())
        assert model.generate(b"def", 1, temperature=0.0) == bytes([likeliest])

    def test_it_draws_bytes_from_a_larger_vocabulary(self) -> None:
        written = ByteGPT(layers=1, width=8, heads=1, context=4, vocabulary=300).generate(b"x", 50)
        assert len(written) == 50

    @pytest.mark.parametrize("training", [True, False])
    def test_it_restores_the_mode(self, model: ByteGPT, training: bool) -> None:
        model.train(training)
        model.generate(b"x", 1)
        assert model.training is training

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"prompt": b"", "length": 1}, "at least 1 byte to continue"),
            ({"prompt": b"x", "length": -1}, "length=-1.*must not be negative"),
            ({"prompt": b"x", "length": 1, "temperature": -0.5}, "temperature=-0.5"),
            ({"prompt": b"x", "length": 1, "temperature": math.nan}, "temperature=nan"),
        ],
    )
    def test_bad_arguments_are_refused(self, model: ByteGPT, arguments: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            model.generate(**arguments)


@pytest.fixture
def library(tmp_path: Path) -> Path:
    for index in range(60):
        (tmp_path / f"module_{index}.py").write_text(f"x = {index}\n")
    return tmp_path


class TestSplit:
    def test_no_file_is_on_both_sides_and_none_is_left_out(self, library: Path) -> None:
        training, validation = standard_library(library)
        assert not set(training) & set(validation)
        assert {*training, *validation} == set(library.glob("*.py"))
        assert 1 <= len(validation) < len(training)

    def test_about_a_tenth_of_the_standard_library_is_for_validation(self) -> None:
        training, validation = standard_library()
        assert 0.03 < len(validation) / (len(training) + len(validation)) < 0.2
        assert "argparse.py" in {path.name for path in (*training, *validation)}

    def test_a_file_keeps_its_side_whatever_lies_beside_it(self, library: Path) -> None:
        training, validation = standard_library(library)
        for path in (training[0], validation[0]):
            path.unlink()
        (library / "another.py").write_text("")
        left = [set(side) - {library / "another.py"} for side in standard_library(library)]
        assert left == [set(training[1:]), set(validation[1:])]

    def test_the_side_is_the_same_in_every_process(self, library: Path) -> None:
        assert [path.name for path in standard_library(library)[1]] == [
            "module_13.py",
            "module_26.py",
            "module_36.py",
            "module_46.py",
            "module_7.py",
        ]

    def test_only_readable_python_files_at_the_top_are_taken(self, library: Path) -> None:
        files = {*library.iterdir()}
        (library / "notes.txt").write_text("no module")
        (library / "package").mkdir()
        (library / "package" / "inner.py").write_text("")
        (library / "folder.py").mkdir()
        training, validation = standard_library(library)
        assert {*training, *validation} == files

    def test_a_library_without_sources_is_an_error(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError, match="0 files for training and 0 for validation"):
            standard_library(tmp_path)


class TestWindows:
    @pytest.fixture
    def file(self, tmp_path: Path) -> Path:
        path = tmp_path / "text"
        path.write_bytes(bytes(range(100)))
        return path

    def test_every_byte_but_the_first_is_a_target_once(self, file: Path) -> None:
        windows = ByteWindows([file], context=9)
        assert len(windows) == 11
        assert torch.cat([windows[i][1:] for i in range(len(windows))]).tolist() == list(range(1, 100))
        assert all(windows[i][-1] == windows[i + 1][0] for i in range(len(windows) - 1))

    def test_bytes_after_the_last_full_window_are_left_out(self, file: Path) -> None:
        windows = ByteWindows([file], context=60)
        assert len(windows) == 1
        assert windows[0].tolist() == list(range(61))

    def test_files_are_read_end_to_end(self, file: Path) -> None:
        windows = ByteWindows([file, file], context=199)
        assert windows[0].tolist() == [*range(100), *range(100)]

    def test_a_batch_at_once_is_the_same_as_one_by_one(self, file: Path) -> None:
        windows = ByteWindows([file], context=9)
        batch = windows.__getitems__([3, 0, 7])
        assert torch.equal(torch.stack(batch), torch.stack([windows[i] for i in (3, 0, 7)]))
        assert batch[0].dtype == torch.int64

    @pytest.mark.parametrize(
        ("context", "message"),
        [(0, r"context=0\): must be at least 1"), (100, "one window needs 101 bytes; give more files")],
    )
    def test_bad_arguments_are_refused(self, file: Path, context: int, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            ByteWindows([file], context=context)


class TestLoaders:
    def test_batches_hold_one_byte_more_than_the_context(self) -> None:
        training, validation = loaders(batch_size=4, context=32, validation_batches=2)
        batch = next(iter(training))
        assert batch.shape == (4, 33)
        assert batch.dtype == torch.int64
        assert [each.shape for each in validation] == [(VALIDATION_BATCH_SIZE, 33)] * 2

    def test_validation_is_the_same_every_time_and_for_every_batch_size(self) -> None:
        _, validation = loaders(batch_size=4, validation_batches=2)
        _, other = loaders(batch_size=32, validation_batches=2)
        first, again, elsewhere = (torch.cat(list(each)) for each in (validation, validation, other))
        assert torch.equal(first, again)
        assert torch.equal(first, elsewhere)

    def test_training_is_shuffled_by_torchs_seed(self) -> None:
        training, _ = loaders(validation_batches=1)
        batches = []
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            batches.append(next(iter(training)))
        assert torch.equal(batches[0], batches[1])
        assert not torch.equal(batches[0], batches[2])

    @pytest.mark.parametrize(
        ("sizes", "message"),
        [
            ({"batch_size": 0}, r"batch_size=0, .*must be at least 1"),
            ({"validation_batches": 0}, r"validation_batches=0\): both must be at least 1"),
            ({"batch_size": 10**9}, r"batch_size=1000000000\): there are \d+ training windows in all"),
            ({"validation_batches": 10**6}, r"validation_batches=1000000\): needs 64000000 windows .*ask for at most"),
        ],
    )
    def test_bad_arguments_are_refused(self, sizes: dict[str, int], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            loaders(**sizes)
