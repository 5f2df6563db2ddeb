"""A process that compiles untrusted grammars under kernel limits, which kill it when exceeded.

`process.py` starts it: python -P -m service.gateway.grammars.child <socket's descriptor> <parent's pid>. It has no
secrets, writes only its replies, and ends with its parent.
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import signal
import socket
import sys

from model.errors import GrammarError
from model.text.grammar_compiler import TextCompiler
from model.text.grammar_task import write_grammar
from service.gateway.grammars.messages import LENGTH, Hello, Reply, decode_hello, decode_task, encode_reply, framed
from service.queue.embedded.die_with_parent import die_with_parent

NICENESS = 3
"""The event loop and the engine take precedence."""
SPENT_BYTES = 64 << 20
"""Growth after which the process is replaced, since it does not return freed memory."""
TOO_BIG = "The grammar takes more than {} MiB to compile."


def main() -> None:
    descriptor, parent = int(sys.argv[1]), int(sys.argv[2])
    die_with_parent(signal.SIGKILL)
    if os.getppid() != parent:
        return
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # sent to the process group; the gateway drains first
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with socket.socket(fileno=descriptor) as link:
        _serve(link)


def _serve(link: socket.socket) -> None:
    data = _receive(link)
    if data is None:
        return
    hello = decode_hello(data)
    compiler = TextCompiler(hello.tokens, len(hello.tokens.pieces), hello.tokens.eos_token_ids)
    gc.freeze()
    _limit_memory(hello.max_memory_bytes)
    _silence()
    idle_bytes = _peak_bytes()
    link.sendall(framed(encode_reply(Reply())))
    while (data := _receive(link)) is not None:
        signal.setitimer(signal.ITIMER_PROF, hello.max_cpu_s)  # SIGPROF kills this process, even inside llguidance
        text, error = _compiled(data, hello, compiler)
        signal.setitimer(signal.ITIMER_PROF, 0)
        is_spent = _peak_bytes() - idle_bytes > SPENT_BYTES
        link.sendall(framed(encode_reply(Reply(text, error, is_spent))))
        if is_spent:
            return


def _compiled(data: bytes, hello: Hello, compiler: TextCompiler) -> tuple[str | None, str | None]:
    try:
        text = write_grammar(decode_task(data), hello.tokens)
        compiler.compile(text)
    except GrammarError as error:
        return None, str(error)
    except RecursionError:
        return None, "The grammar is nested too deeply."
    except MemoryError:
        return None, TOO_BIG.format(hello.max_memory_bytes >> 20)
    return text, None


def _receive(link: socket.socket) -> bytes | None:
    """Return the next frame; None once the gateway has closed the socket."""
    head = _receive_exactly(link, LENGTH.size)
    return None if head is None else _receive_exactly(link, LENGTH.unpack(head)[0])


def _receive_exactly(link: socket.socket, num_bytes: int) -> bytes | None:
    data = bytearray()
    while len(data) < num_bytes:
        more = link.recv(min(num_bytes - len(data), 1 << 20))
        if not more:
            return None
        data += more
    return bytes(data)


def _limit_memory(max_bytes: int) -> None:
    if sys.platform != "linux":
        return
    with open("/proc/self/statm", encoding="utf-8") as statm:
        num_pages = int(statm.read().split()[0])
    limit = num_pages * resource.getpagesize() + max_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _silence() -> None:
    """Silence Rust's messages about failed allocations."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)
    os.close(nowhere)


def _peak_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak << 10


if __name__ == "__main__":
    main()
