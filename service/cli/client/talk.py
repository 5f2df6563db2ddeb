"""`quire chat` and `quire complete`: stream a running service's responses to the terminal."""

from __future__ import annotations

import argparse
import asyncio
import math
import signal
import sys
from collections.abc import Coroutine
from contextlib import aclosing, suppress
from typing import Any

from service.cli.client.api import ServiceClient, ServiceError, add_client_flags, connected

with suppress(ImportError):  # missing from some builds of Python
    import readline  # noqa: F401  (gives input() history and editing)

PROMPT_SIGN = "> "


def add_chat_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "message", nargs="?", help="the only message (default: a conversation, or all of a piped stdin)"
    )
    parser.add_argument("--system", metavar="TEXT", help="system message (default: none)")
    _add_sampling_flags(parser)


def add_complete_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", nargs="?", help="text to complete (default: stdin)")
    _add_sampling_flags(parser)


def _add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    add_client_flags(parser)
    parser.add_argument("--model", metavar="NAME", help="model name (default: the served one)")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="max tokens of an answer (default: the service's)")
    parser.add_argument(
        "--temperature", type=_finite, metavar="X", help="sampling temperature; 0: greedy (default: the model's)"
    )
    parser.add_argument("--seed", type=int, metavar="N", help="seed of the samples (default: random)")


def _finite(text: str) -> float:
    with suppress(ValueError):
        if math.isfinite(value := float(text)):
            return value
    raise argparse.ArgumentTypeError(f"{text!r} is not a number")


def run_chat(flags: argparse.Namespace) -> int:
    """Return 0, or 1 if the service did not answer."""
    return _run(flags.verb, _chat(flags))


def run_complete(flags: argparse.Namespace) -> int:
    """Return 0, or 1 if the service did not answer."""
    return _run(flags.verb, _complete(flags))


def _run(verb: str, work: Coroutine[Any, Any, None]) -> int:
    try:
        asyncio.run(work)
    except ServiceError as error:
        print(f"quire {verb}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print()
    return 0


async def _chat(flags: argparse.Namespace) -> None:
    async with connected(flags) as client:
        params = await _body(client, flags)
        messages = [{"role": "system", "content": flags.system}] if flags.system else []
        if flags.message is not None or not sys.stdin.isatty():
            text = sys.stdin.read() if flags.message is None else flags.message
            await _answer(client, params, [*messages, _user(text)])
            return
        print(f"{params['model']} is ready. Ctrl-C stops an answer, Ctrl-D quits.")
        while (line := _line()) is not None:
            if line.strip():
                messages.append(_user(line))
                messages.append({"role": "assistant", "content": await _interruptible(client, params, messages)})
        print()


async def _complete(flags: argparse.Namespace) -> None:
    async with connected(flags) as client:
        params = await _body(client, flags)
        prompt = flags.prompt if flags.prompt is not None else sys.stdin.read()
        async with aclosing(client.stream("/v1/completions", {**params, "prompt": prompt})) as chunks:
            async for chunk in chunks:
                print(prompt + chunk["choices"][0]["text"], end="", flush=True)
                prompt = ""
        print()


async def _body(client: ServiceClient, flags: argparse.Namespace) -> dict[str, Any]:
    given = {name: getattr(flags, name) for name in ("max_tokens", "temperature", "seed")}
    return {
        "model": flags.model or await client.model(),
        **{name: value for name, value in given.items() if value is not None},
    }


async def _interruptible(client: ServiceClient, params: dict[str, Any], messages: list[dict[str, str]]) -> str:
    printed: list[str] = []
    loop, answer = asyncio.get_running_loop(), asyncio.ensure_future(_answer(client, params, messages, printed))
    loop.add_signal_handler(signal.SIGINT, answer.cancel)
    try:
        await answer
    except asyncio.CancelledError:
        print()
    except ServiceError as error:
        print(error, file=sys.stderr)
    finally:
        loop.remove_signal_handler(signal.SIGINT)
    return "".join(printed)


async def _answer(
    client: ServiceClient, params: dict[str, Any], messages: list[dict[str, str]], printed: list[str] | None = None
) -> None:
    async with aclosing(client.stream("/v1/chat/completions", {**params, "messages": messages})) as chunks:
        async for chunk in chunks:
            text = chunk["choices"][0]["delta"].get("content") or ""
            print(text, end="", flush=True)
            if printed is not None:
                printed.append(text)
    print()


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _line() -> str | None:
    """Return the next typed line, or None after Ctrl-D or Ctrl-C.

    Not in a thread: there Ctrl-C would wait for the end of the line.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return input(PROMPT_SIGN)
    except (EOFError, KeyboardInterrupt):
        return None
    finally:
        signal.signal(signal.SIGINT, before)
