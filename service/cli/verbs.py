"""Verbs of `quire`. Modules are imported only for the chosen verb, so that processes start faster and stay smaller."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import NamedTuple

from service.config.settings import Settings

WITH_SETTINGS = {
    "serve": "run everything: embedded Redis, gateways, workers",
    "gateway": "run a gateway, or several on one port, on an existing Redis",
    "worker": "run a worker, one model on one device, on an existing Redis",
    "check": "report what fits before loading: weights, blocks, concurrency",
    "bench": "measure the engine, its operations, or a running service",
}
"""Help by verb."""

COMPLETION = "completion"
"""Needs all other verbs, so `load_plain_verb` does not load it."""

WITHOUT_SETTINGS = {
    "chat": "chat with the model of a running service",
    "complete": "complete a text with the model of a running service",
    "top": "watch a running service: requests, tokens, latencies, KV blocks",
    "dead": "list, show and requeue dead letters: jobs that killed engines",
    "quantize": "write a model folder in fp8 or int4",
    COMPLETION: "print a shell completion script",
    "key": "make an API key and its line for --api-key-file",
}

HELP = WITH_SETTINGS | WITHOUT_SETTINGS


AddFlags = Callable[[argparse.ArgumentParser], None]


class Verb(NamedTuple):
    add_flags: AddFlags | None  # besides the settings
    run: Callable[[Settings, argparse.Namespace], int]


class PlainVerb(NamedTuple):
    add_flags: AddFlags
    run: Callable[[argparse.Namespace], int]


def load_verb(verb: str) -> Verb:
    """Import a verb of WITH_SETTINGS."""
    if verb == "serve":
        from service.cli.serve import serve_command

        return Verb(None, serve_command)
    if verb == "gateway":
        from service.cli.gateway import gateway_command

        return Verb(None, gateway_command)
    if verb == "worker":
        from service.cli.worker import worker_command

        return Verb(None, worker_command)
    if verb == "check":
        from service.cli.check import add_check_flags, run_check

        return Verb(add_check_flags, run_check)
    from service.bench.command import add_bench_flags, run_bench

    return Verb(add_bench_flags, run_bench)


def load_plain_verb(verb: str) -> PlainVerb:
    """Import a verb of WITHOUT_SETTINGS except COMPLETION."""
    if verb in ("chat", "complete"):
        from service.cli.client.talk import add_chat_flags, add_complete_flags, run_chat, run_complete

        return PlainVerb(add_chat_flags, run_chat) if verb == "chat" else PlainVerb(add_complete_flags, run_complete)
    if verb == "top":
        from service.cli.client.top import add_top_flags, run_top

        return PlainVerb(add_top_flags, run_top)
    if verb == "dead":
        from service.cli.dead_letters import add_dead_flags, run_dead

        return PlainVerb(add_dead_flags, run_dead)
    if verb == "quantize":
        from service.cli.quantize import add_quantize_flags, run_quantize

        return PlainVerb(add_quantize_flags, run_quantize)
    from service.cli.keys import add_key_flags, run_key

    return PlainVerb(add_key_flags, run_key)
