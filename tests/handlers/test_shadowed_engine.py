"""A user's own engine.py beside their script hides the package `engine`."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def import_handlers(folder, script="import handlers"):
    code = f"import sys; sys.path[:0] = [{str(folder)!r}, {str(ROOT)!r}]; {script}"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=folder, check=False)


@pytest.mark.parametrize("layout", ["engine.py", "engine/__init__.py"])
@pytest.mark.parametrize("script", ["import handlers", "import engine; import handlers"])
def test_a_shadowing_file_is_named_with_the_remedy(tmp_path, layout, script):
    file = tmp_path / layout
    file.parent.mkdir(exist_ok=True)
    file.write_text("class Engine: ...\n")
    done = import_handlers(tmp_path, script)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        f"ImportError: handlers: {file} hides Pulsetrain's package `engine`, because Python finds it first; "
        "rename that file (or folder), or start Python where it is not on sys.path"
    )


def test_the_shadowing_file_is_not_run(tmp_path):
    (tmp_path / "engine.py").write_text("print('was run')\n")
    assert "was run" not in import_handlers(tmp_path).stdout


def test_a_folder_of_that_name_without_python_in_it_hides_nothing(tmp_path):
    (tmp_path / "engine").mkdir()
    done = import_handlers(
        tmp_path, "import importlib.util, handlers; print(importlib.util.find_spec('engine').origin)"
    )
    assert done.stdout.strip() == str(ROOT / "engine" / "__init__.py")
