"""A Redis with deploy/redis.conf and deploy/users.acl, and queues that log in as the users of their roles."""

from __future__ import annotations

import subprocess
import time
from hashlib import sha256
from pathlib import Path

from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from service.queue.embedded.redis import find_program
from service.queue.redis.connect import LEASE_S, open_gateway_queue, open_worker_queue
from tests.support.queue_pair import QueuePair
from tests.support.served import REPOSITORY

DEPLOY = REPOSITORY / "deploy"
ADMIN, GATEWAY, WORKER, PRODUCER = "quire-admin", "quire-gateway", "quire-worker", "alice"
START_WAIT_S = 10.0


class ConfiguredRedis:
    """A running server with the users of users.acl; a user's password is its name reversed."""

    def __init__(self, folder: Path, *flags: str):
        """`folder` must be short: a socket's path has at most 107 bytes."""
        users = folder / "users.acl"
        users.write_text(server_acl())
        self.socket = folder / "redis.sock"
        command = [find_program(), str(DEPLOY / "redis.conf"), "--port", "0", "--unixsocket", str(self.socket)]
        self._process = subprocess.Popen(
            [*command, "--dir", str(folder), "--aclfile", str(users), *flags], stdout=subprocess.DEVNULL
        )
        self.admin = Redis.from_url(self.url(ADMIN))
        give_up_s = time.monotonic() + START_WAIT_S
        while not self._answers():
            assert self._process.poll() is None, "the server does not take its configuration"
            assert time.monotonic() < give_up_s
            time.sleep(0.02)

    def url(self, user: str) -> str:
        return f"unix://{user}:{password_of(user)}@{self.socket}"

    def refusals(self) -> list[str]:
        """Return what users were refused since the last call: user, command or key. Ignores redis-py's CLIENT SETINFO,
        which producers may not run."""
        entries = self.admin.execute_command("ACL", "LOG")
        self.admin.execute_command("ACL", "LOG", "RESET")
        refused = [f"{entry[b'username'].decode()} {entry[b'object'].decode()}" for entry in map(_as_dict, entries)]
        return [line for line in refused if line != f"{PRODUCER} client|setinfo"]

    def allows(self, user: str, *command: str) -> bool:
        return self.admin.execute_command("ACL", "DRYRUN", user, *command) == b"OK"

    def stop(self) -> None:
        self.admin.close()
        self._process.terminate()
        self._process.wait(10)

    def _answers(self) -> bool:
        try:
            return bool(self.admin.ping())
        except RedisConnectionError:
            return False


async def open_roles_pair(server: ConfiguredRedis, name: str | None = None, lease_s: float = LEASE_S) -> QueuePair:
    """Connect both ends, each as the user of its role."""
    gateway = await open_gateway_queue(server.url(GATEWAY))
    return QueuePair(gateway, await open_worker_queue(server.url(WORKER), name, lease_s=lease_s))


def server_acl() -> str:
    """Return the ACL lines that the README's command makes of users.acl."""
    lines = [line for line in (DEPLOY / "users.acl").read_text().splitlines() if line.startswith("user ")]
    for number, line in enumerate(lines):
        user = line.split()[1]
        role = user.removeprefix("quire-").upper()
        lines[number] = line.replace(f"#{role}_SHA256", "#" + sha256(password_of(user).encode()).hexdigest())
    return "\n".join(lines) + "\n"


def password_of(user: str) -> str:
    return user[::-1]


def _as_dict(entry: object) -> dict[bytes, bytes]:
    """Return a dict for either form in which the client returns a map."""
    if isinstance(entry, dict):
        return {key.encode() if isinstance(key, str) else key: value for key, value in entry.items()}
    return dict(zip(entry[::2], entry[1::2], strict=True))
