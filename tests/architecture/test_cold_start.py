"""`nanorl --help` answers at once, because nothing heavy is imported before a command needs it."""

import os
import resource
import subprocess
import sys

HELP = """
import sys
sys.argv = ["nanorl", *sys.argv[1:]]
from nanorl.cli import main
try:
    main()
finally:
    print(*sorted({name.partition(".")[0] for name in sys.modules}), file=sys.stderr)
"""

HEAVY = {"torch", "transformers", "tokenizers", "safetensors", "numpy", "fastapi", "uvicorn", "httpx", "urllib3"}


def _help(*command: str) -> subprocess.CompletedProcess[str]:
    arguments = [sys.executable, "-c", HELP, *command, "--help"]
    # Measuring the child's coverage would double what it takes.
    env = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}
    return subprocess.run(arguments, capture_output=True, text=True, timeout=60, check=True, env=env)


def test_help_imports_nothing_heavy():
    result = _help("train")
    assert "--group-size" in result.stdout
    imported = set(result.stderr.split())
    assert "typer" in imported
    assert imported & HEAVY == set()


def _processor_s() -> float:
    """Processor time of one `nanorl --help`: what the clock shows on an idle machine, and steadier on a busy one."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    _help()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_help_takes_less_than_300_ms():
    """The best of ten counts: noise only ever adds."""
    assert any(_processor_s() < 0.3 for _ in range(10))
