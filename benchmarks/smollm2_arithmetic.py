"""Writes a task that a 135 M model can begin with: small two-step sums after two worked examples.

Usage: `python smollm2_arithmetic.py FILE.jsonl`.
"""

import json
import random
import sys
from pathlib import Path

EXAMPLES = (
    ("What is (2 * 3) + 4?", "2 * 3 = 6, 6 + 4 = 10. <answer>10</answer>"),
    ("What is 9 - (2 * 4)?", "2 * 4 = 8, 9 - 8 = 1. <answer>1</answer>"),
)


def main(path: Path) -> None:
    """One line a problem, shuffled; nanorl holds the last tenth out."""
    problems = [
        (expression, value)
        for a in range(2, 6)
        for b in range(2, 6)
        for c in range(1, 10)
        for expression, value in ((f"({a} * {b}) + {c}", a * b + c), (f"{c} + ({a} * {b})", a * b + c))
    ]
    random.Random(0).shuffle(problems)
    shots = [
        message
        for question, answer in EXAMPLES
        for message in ({"role": "user", "content": question}, {"role": "assistant", "content": answer})
    ]
    lines = [
        json.dumps({"prompt": [*shots, {"role": "user", "content": f"What is {expression}?"}], "label": value})
        for expression, value in problems
    ]
    path.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
