"""Files and functions stay small enough to read at one go."""

import ast
from collections.abc import Iterator

from tests.architecture.layout import PACKAGE, ROOT, source_files

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60


def _functions(source: str) -> Iterator[tuple[str, int]]:
    """Name and length in lines of each function, nested ones and methods too; decorators count."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            yield node.name, (node.end_lineno or node.lineno) - first + 1


def test_files_have_at_most_400_lines():
    lengths = {str(file.relative_to(ROOT)): len(file.read_text().splitlines()) for file in source_files()}
    assert "nanorl/loops/train.py" in lengths
    assert {name: length for name, length in lengths.items() if length > MAX_FILE_LINES} == {}


def test_functions_have_at_most_60_lines():
    lengths = {
        f"{file.relative_to(ROOT)}:{name}": length
        for file in source_files()
        for name, length in _functions(file.read_text())
    }
    assert "nanorl/loops/train.py:train" in lengths
    # The commands are lists of flags: their length is the number of flags, their body is one call.
    too_long = {
        name: length
        for name, length in lengths.items()
        if length > MAX_FUNCTION_LINES and not name.startswith("nanorl/cli.py:")
    }
    assert too_long == {}


def test_the_loop_stands_on_one_screen():
    lengths = dict(_functions((PACKAGE / "loops" / "train.py").read_text()))
    assert lengths["train"] + lengths["turn"] + lengths["_step"] <= 60
    asynchronous = (PACKAGE / "loops" / "train_async.py").read_text()
    assert len(asynchronous.splitlines()) <= 60


def test_the_measure_counts_decorators_and_nested_functions():
    source = "@a\n@b\ndef outer():\n    def inner():\n        pass\n    return inner\n"
    assert dict(_functions(source)) == {"outer": 6, "inner": 2}


def test_every_folder_with_code_is_a_package():
    """A folder without __init__.py is invisible to import-linter, and with it every rule about it."""
    folders = {file.parent for file in source_files()}
    assert [str(folder.relative_to(ROOT)) for folder in folders if not (folder / "__init__.py").exists()] == []
