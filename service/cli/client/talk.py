"""`quire chat` and `quire complete`: a running service answers in the terminal, token by token."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import Coroutine
from contextlib import aclosing, suppress
from typing import Any

from service.cli.client.api import Api, ServiceError, add_client_flags, connected

with suppress(ImportError):  # some Pythons are built without it
    import readline  # noqa: F401  (gives input() a history and editing)

PROMPT_SIGN = "> "


def add_chat_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("message", nargs="?", help="ask this and leave; without it a conversation, or all of a pipe")
    parser.add_argument("--system", metavar="TEXT", help="the system message that opens the conversation")
    _add_wishes(parser)


def add_complete_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", nargs="?", help="the text to go on with; without it what comes through a pipe")
    _add_wishes(parser)


def _add_wishes(parser: argparse.ArgumentParser) -> None:
    add_client_flags(parser)
    parser.add_argument("--model", metavar="NAME", help="without it the one that is served")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="longest answer, in tokens")
    parser.add_argument("--temperature", type=float, metavar="X", help="0: always the likeliest token")
    parser.add_argument("--seed", type=int, metavar="N", help="the same seed, the same answer")


def run_chat(flags: argparse.Namespace) -> int:
    """0: answered, 1: not."""
    return _run(flags.verb, _chat(flags))


def run_complete(flags: argparse.Namespace) -> int:
    """0: answered, 1: not."""
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
    async with connected(flags) as api:
        wishes = await _wishes(api, flags)
        messages = [{"role": "system", "content": flags.system}] if flags.system else []
        if flags.message is not None or not sys.stdin.isatty():
            text = sys.stdin.read() if flags.message is None else flags.message
            await _answer(api, wishes, [*messages, _user(text)])
            return
        print(f"{wishes['model']} listens. Ctrl-C breaks off an answer, Ctrl-D leaves.")
        while (line := _line()) is not None:
            if line.strip():
                messages.append(_user(line))
                messages.append({"role": "assistant", "content": await _interruptible(api, wishes, messages)})
        print()


async def _complete(flags: argparse.Namespace) -> None:
    async with connected(flags) as api:
        wishes = await _wishes(api, flags)
        prompt = flags.prompt if flags.prompt is not None else sys.stdin.read()
        print(prompt, end="", flush=True)
        async with aclosing(api.stream("/v1/completions", {**wishes, "prompt": prompt})) as chunks:
            async for chunk in chunks:
                print(chunk["choices"][0]["text"], end="", flush=True)
        print()


async def _wishes(api: Api, flags: argparse.Namespace) -> dict[str, Any]:
    given = {name: getattr(flags, name) for name in ("max_tokens", "temperature", "seed")}
    return {
        "model": flags.model or await api.model(),
        **{name: value for name, value in given.items() if value is not None},
    }


async def _interruptible(api: Api, wishes: dict[str, Any], messages: list[dict[str, str]]) -> str:
    """The answer, or what was told of it before Ctrl-C."""
    told: list[str] = []
    loop, answer = asyncio.get_running_loop(), asyncio.ensure_future(_answer(api, wishes, messages, told))
    loop.add_signal_handler(signal.SIGINT, answer.cancel)
    try:
        await answer
    except asyncio.CancelledError:
        print()
    except ServiceError as error:
        print(error, file=sys.stderr)
    finally:
        loop.remove_signal_handler(signal.SIGINT)
    return "".join(told)


async def _answer(
    api: Api, wishes: dict[str, Any], messages: list[dict[str, str]], told: list[str] | None = None
) -> None:
    async with aclosing(api.stream("/v1/chat/completions", {**wishes, "messages": messages})) as chunks:
        async for chunk in chunks:
            text = chunk["choices"][0]["delta"].get("content") or ""
            print(text, end="", flush=True)
            if told is not None:
                told.append(text)
    print()


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _line() -> str | None:
    """What is typed next; None: Ctrl-D or Ctrl-C. In a thread nothing would break the wait off: Ctrl-C would do nothing
    before the line had its end too."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return input(PROMPT_SIGN)
    except (EOFError, KeyboardInterrupt):
        return None
    finally:
        signal.signal(signal.SIGINT, before)
