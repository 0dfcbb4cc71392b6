"""`footplate chat`: talk to a model in the terminal."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Annotated, Any

import httpx
import typer

from footplate.platform.cli.client import open_client, refused, send, unreachable
from footplate.platform.cli.errors import CommandError


def chat(
    prompt: Annotated[
        str | None, typer.Argument(help="One question; without it a conversation begins.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Model to ask; the first one served when left out.")
    ] = None,
    system: Annotated[
        str | None, typer.Option(help="Instructions that stand before the conversation.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Longest answer in tokens.", min=1)] = 512,
    temperature: Annotated[float, typer.Option(help="0 is the most likely answer.", min=0, max=2)] = 0.6,
) -> None:
    """Stream answers of a running platform (FOOTPLATE_URL, FOOTPLATE_API_KEY) to the terminal."""
    messages: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []
    options = {"max_completion_tokens": max_tokens, "temperature": temperature}
    with open_client("tenant.key") as client:
        asked = model or _first_model(client)
        for question in [prompt] if prompt else _questions():
            messages.append({"role": "user", "content": question})
            body = {"model": asked, "messages": messages, "stream": True, **options}
            messages.append(
                {"role": "assistant", "content": _show(_stream(client, body), is_last=bool(prompt))}
            )


def _show(pieces: Iterator[str], *, is_last: bool) -> str:
    """Write an answer as it comes. Ctrl-C ends the answer, and in a conversation nothing else."""
    answer = ""
    try:
        for piece in pieces:
            answer += piece
            sys.stdout.write(piece)
            sys.stdout.flush()
    except KeyboardInterrupt:
        if is_last:
            raise
    finally:
        print()
    return answer


def _questions() -> Iterator[str]:
    print("Ctrl-C ends an answer, Ctrl-D the conversation.", file=sys.stderr)
    while True:
        try:
            question = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if question:
            yield question


def _first_model(client: httpx.Client) -> str:
    models = send(client, "GET", "/v1/models").json()["data"]
    if not models:
        raise CommandError("the platform serves no model yet; try again in a moment")
    return str(models[0]["id"])


def _stream(client: httpx.Client, body: dict[str, Any]) -> Iterator[str]:
    """The pieces of one streamed answer."""
    try:
        with client.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.is_error:
                response.read()
                raise refused(response)
            for line in response.iter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    yield from _pieces(json.loads(line[6:]))
    except httpx.HTTPError as error:
        raise unreachable(error) from None


def _pieces(event: dict[str, Any]) -> Iterator[str]:
    if "error" in event:
        raise CommandError(f"the answer broke off: {event['error'].get('message')}")
    for choice in event.get("choices", []):
        if text := choice.get("delta", {}).get("content"):
            yield text
