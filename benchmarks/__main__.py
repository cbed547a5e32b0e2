"""List the benchmarks: each module has a command of its own, and a first docstring line that says what it shows."""

import ast
from pathlib import Path

for path in sorted(Path(__file__).parent.glob("[a-z]*.py")):
    summary = (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]
    print(f"python -m benchmarks.{path.stem:<16} {summary}")
