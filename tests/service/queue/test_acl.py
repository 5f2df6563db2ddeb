"""deploy/users.acl: each role may do its work (the other tests of this folder, run as `roles`) and nothing else."""

from __future__ import annotations

import inspect
import re

import pytest
from redis import Redis
from redis.exceptions import AuthenticationError, ResponseError

from service.queue import keys
from tests.support.configured_redis import ADMIN, DEPLOY, GATEWAY, PRODUCER, WORKER, server_acl

RW, R, NO = "rw", "r", ""
RIGHTS = {
    keys.JOBS: (RW, RW, NO),
    keys.STATES: (RW, RW, NO),
    keys.CLAIMS: (RW, RW, NO),
    keys.DEADLINES: (RW, RW, NO),
    keys.WAITING: (RW, RW, NO),
    keys.WAITING_TOKENS: (RW, RW, NO),
    keys.WAITING_PREFIXES: (RW, RW, NO),
    keys.WAITING_LOADS: (RW, RW, NO),
    keys.waiting_since("w"): (RW, RW, NO),
    keys.RETURNED: (RW, RW, NO),
    keys.SUSPECTS: (RW, RW, NO),
    keys.LEASES: (RW, RW, NO),
    keys.EPOCH: (RW, RW, NO),
    keys.ALONE: (NO, RW, NO),
    keys.DEAD: (NO, RW, NO),
    keys.DEATHS: (NO, RW, NO),
    keys.CLOCK: (RW, RW, NO),
    keys.CANCELS: (RW, R, NO),
    keys.WORKERS: (R, RW, NO),
    keys.LOOKED_AT: (RW, R, NO),
    keys.events("J"): (RW, RW, NO),
    keys.cancel("J"): (RW, NO, NO),
    keys.request("J"): (RW, NO, NO),
    keys.watched("J"): (RW, NO, NO),
    keys.idempotency("J"): (RW, NO, NO),
    keys.file("J"): (RW, NO, NO),
    keys.file_data("J"): (RW, NO, NO),
    keys.files("J"): (RW, NO, NO),
    keys.batch("J"): (RW, NO, NO),
    keys.batch_lines("J"): (RW, NO, NO),
    keys.batch_holder("J"): (RW, NO, NO),
    keys.batch_cancel("J"): (RW, NO, NO),
    keys.batches("J"): (RW, NO, NO),
    keys.response("J"): (RW, NO, NO),
    keys.batch_marks("J"): (RW, NO, NO),
    keys.batch_progress("J"): (RW, NO, NO),
    keys.stored("J"): (RW, NO, NO),
    keys.stored_bytes("J"): (RW, NO, NO),
    keys.records("J"): (RW, NO, NO),
    keys.record_bytes("J"): (RW, NO, NO),
    keys.OPEN_BATCHES: (RW, NO, NO),
    keys.ADAPTERS: (RW, NO, NO),
    keys.feed("d"): (RW, RW, NO),
    keys.worker("w"): (R, RW, NO),
    keys.ingress("alice"): (RW, NO, RW),
    keys.ingress("bob"): (RW, NO, NO),
    keys.reply("alice", "1"): (RW, NO, R),
    keys.reply("bob", "1"): (RW, NO, NO),
    keys.reply_of("alice", "1"): (RW, NO, R),
    keys.reply_of("bob", "1"): (RW, NO, NO),
    "another:programs": (NO, NO, NO),
}
"""Rights of gateway, worker and producer `alice` on each key of the page."""
FORBIDDEN = (
    "FLUSHALL", "FLUSHDB", "KEYS *", "SCAN 0", "RANDOMKEY", "DBSIZE", "CONFIG GET *", "CONFIG SET maxmemory 1",
    "SHUTDOWN", "ACL LIST", "ACL SETUSER x on", "ACL WHOAMI", "CLIENT LIST", "CLIENT KILL 1.2.3.4:5",
    "CLIENT PAUSE 100", "MONITOR", "DEBUG SLEEP 0", "MODULE LIST", "SCRIPT FLUSH", "FUNCTION LIST", "SAVE",
    "BGSAVE", "BGREWRITEAOF", "SLAVEOF NO ONE", "REPLICAOF h 1", "SWAPDB 0 1", "MIGRATE h 1 {quire}:jobs 0 1",
    "RESTORE {quire}:jobs 0 x", "DUMP {quire}:jobs", "PUBLISH c m", "SUBSCRIBE c", "RENAME {quire}:jobs {quire}:x",
    "XTRIM {quire}:waiting MAXLEN 0", "XGROUP DESTROY {quire}:ingress:alice doors",
    "XGROUP SETID {quire}:ingress:alice doors 0", "XSETID {quire}:waiting 9-9", "EVAL_RO x 0", "SORT {quire}:jobs",
    "LATENCY RESET",
)  # fmt: skip
"""Commands that no role has any work for."""
PRODUCER_FORBIDDEN = (
    "XDEL {quire}:ingress:alice 1-0", "DEL {quire}:ingress:alice", "EXPIRE {quire}:ingress:alice 1",
    "XLEN {quire}:ingress:alice", "XRANGE {quire}:ingress:alice - +", "XADD {quire}:reply:alice:1 * m x", "EVAL x 0",
    "TIME", "INFO", "GET {quire}:jobs", "XREADGROUP GROUP doors x STREAMS {quire}:ingress:alice >",
)  # fmt: skip


def named_on_the_page() -> set[str]:
    """Every key that the key page makes, without what is filled in."""
    return set(re.findall(r'"(\{+quire\}+:[^"]*)"', re.sub(r"\{_name\(\w+\)\}", "*", inspect.getsource(keys))))


def test_every_key_is_decided_here():
    decided = {re.sub(r"(?<=[:{])(J|d|w|1|alice|bob)(?=[:}]|$)", "*", key) for key in RIGHTS}
    assert {key.replace("{{", "{").replace("}}", "}") for key in named_on_the_page()} == decided - {"another:programs"}


@pytest.mark.parametrize("key", RIGHTS)
def test_a_role_reaches_the_keys_of_its_work(configured_redis, key):
    for user, right in zip((GATEWAY, WORKER, PRODUCER), RIGHTS[key], strict=True):
        assert configured_redis.allows(user, "XREAD", "STREAMS", key, "0") == (right in (R, RW)), (user, right)
        assert configured_redis.allows(user, "XADD", key, "*", "m", "x") == (right == RW), (user, right)


@pytest.mark.parametrize("user", [GATEWAY, WORKER, PRODUCER])
def test_what_none_needs_is_forbidden(configured_redis, user):
    allowed = [command for command in FORBIDDEN if configured_redis.allows(user, *command.split())]
    assert allowed == []
    assert all(configured_redis.allows(ADMIN, *command.split()) for command in ("FLUSHALL", "ACL LIST", "KEYS *"))


def test_a_producer_only_adds_and_reads(configured_redis):
    allowed = [command for command in PRODUCER_FORBIDDEN if configured_redis.allows(PRODUCER, *command.split())]
    assert allowed == []


def test_a_script_may_do_no_more_than_its_user(configured_redis):
    with Redis.from_url(configured_redis.url(WORKER)) as worker, pytest.raises(ResponseError, match="access"):
        worker.eval("return redis.call('XADD', '{quire}:ingress:alice', '*', 'm', 'x')", 0)
    assert any(refusal.startswith("quire-worker") for refusal in configured_redis.refusals()), "refusals are seen"


@pytest.mark.parametrize("user", ["", "default:x@", "quire-gateway:wrong@", "quire-worker@"])
def test_none_enters_without_name_and_password(configured_redis, user):
    with Redis.from_url(f"unix://{user}{configured_redis.socket}") as stranger, pytest.raises(AuthenticationError):
        stranger.ping()


def test_the_page_holds_no_password_and_redis_refuses_it_unfilled():
    page = (DEPLOY / "users.acl").read_text()
    assert not re.search(r"[ ]>|nopass|#[0-9a-f]{64}", page)
    assert "_SHA256" not in server_acl()
    assert {line.split()[1] for line in server_acl().splitlines()} == {"default", ADMIN, GATEWAY, WORKER, PRODUCER}


def test_the_configuration_is_what_the_page_says(configured_redis):
    found = configured_redis.admin.config_get("*")
    wanted = {
        "appendonly": "yes",
        "appendfsync": "everysec",
        "maxmemory": str(2 << 30),
        "maxmemory-policy": "noeviction",
        "maxmemory-clients": "25%",
        "proto-max-bulk-len": str(16 << 20),
        "client-query-buffer-limit": str(64 << 20),
        "enable-module-command": "no",
        "save": "",
    }
    assert {name: found[name] for name in wanted} == wanted
    assert "normal 67108864 16777216 30" in found["client-output-buffer-limit"]
