"""Train the classifier of prompts: `python train_classifier.py --set FILE --answers DIR --out FILE`.

It learns from the items of the split `train` alone, so that thresholds are set and measured on items that it
has never seen. `DIR` is a folder that `footplate eval cascade` has written.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from footplate.routing.classifier import Example, train
from footplate.routing.evaluation import parse_set
from footplate.routing.prompt_facts import prompt_facts


def rights(path: Path) -> tuple[str, dict[str, bool]]:
    """A model's source, and whether it is right, by item."""
    head, *lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    return head["source"], {line["id"]: line["is_right"] for line in lines}


def main() -> None:
    """Read, fit, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--set", type=Path, required=True)
    parser.add_argument("--answers", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--ridge", type=float, default=1.0)
    given = parser.parse_args()
    small, of_small = rights(given.answers / "answers_small.jsonl")
    large, of_large = rights(given.answers / "answers_large.jsonl")
    items = parse_set(given.set.read_text("utf-8").splitlines())
    examples = [
        Example(prompt_facts([item.prompt]), of_small[item.id] or not of_large[item.id])
        for item in items
        if item.split == "train"
    ]
    found = train(examples, small, large, ridge=given.ridge)
    given.out.write_text(found.to_json(), "utf-8")
    print(f"{len(examples)} examples, {sum(each.is_safe for each in examples)} of them safe: {given.out}")


if __name__ == "__main__":
    main()
