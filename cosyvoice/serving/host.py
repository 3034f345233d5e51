"""What the machine must offer before Triton starts: libpython, free ports, no leftovers of a killed server."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import secrets
import shutil
import socket
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil

_WORKSPACE_PREFIX = "cosyvoice-reward-"
STACK_BYTES = 512 * 2**20
logger = logging.getLogger(__name__)


class HostError(RuntimeError):
    """The server cannot start on this host. The message is one sentence for the user."""


def check_ports(host: str, ports: dict[str, int]) -> None:
    """Fail before anything is started if a port cannot be bound: Triton's own message would mislead.

    Args:
        ports: option name -> port.

    Raises:
        HostError: a port is taken, given twice, or the address does not belong to this machine.
    """
    seen: dict[int, str] = {}
    for option, port in ports.items():
        if port in seen:
            raise HostError(f"{option} and {seen[port]} are both {port}, expected different ports")
        seen[port] = option
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with contextlib.closing(socket.socket(family, socket.SOCK_STREAM)) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError as error:
                raise HostError(f"{option} {port} on {host} cannot be used: {error.strerror}") from error


def libpython_folder() -> Path | None:
    """Folder of the running interpreter's own shared library, or None if it was built without one."""
    name = sysconfig.get_config_var("INSTSONAME") or ""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    names = [name] if ".so" in name else [f"libpython{version}.so.1.0", f"libpython{version}.so"]
    folders = [sysconfig.get_config_var("LIBDIR"), f"{sys.base_prefix}/lib", f"{sys.base_prefix}/lib64"]
    for folder in filter(None, folders):
        if any((Path(folder) / candidate).is_file() for candidate in names):
            return Path(folder)
    return None


def export_libpython() -> None:
    """Let Triton's Python stub find the interpreter in use, before another libpython of the system.

    The stub is a child process, so changing this process' environment is enough. With another patch release of
    Python the model load fails with messages such as ``RLock has no attribute _recursion_count``.
    """
    folder = libpython_folder()
    if folder is None:
        logger.warning("this Python has no shared libpython; if Triton cannot load its stub, use one that has")
        return
    paths = os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    if str(folder) not in paths:
        os.environ["LD_LIBRARY_PATH"] = os.pathsep.join([str(folder), *filter(None, paths)])


@contextlib.contextmanager
def large_stacks() -> Iterator[None]:
    """Processes started meanwhile get threads with large stacks (virtual memory, used only if needed).

    Triton 2.51 keeps text of a JSON request on the stack: with the usual 8 MiB, some 4 MB of text are a segmentation
    fault that ends the server.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_STACK)
    wanted = STACK_BYTES if hard == resource.RLIM_INFINITY else min(STACK_BYTES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_STACK, (wanted, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_STACK, (soft, hard))


def new_workspace() -> Path:
    """A short path (Unix sockets live in it) that names its owner; leftovers of dead owners are removed first."""
    base = Path(tempfile.gettempdir())
    for folder in base.glob(f"{_WORKSPACE_PREFIX}*"):
        owner = folder.name.removeprefix(_WORKSPACE_PREFIX).split("-")[0]
        if owner.isdigit() and not psutil.pid_exists(int(owner)):
            logger.info("removing what the killed server %s left behind", owner)
            remove_leftovers(folder, int(owner))
    return base / f"{_WORKSPACE_PREFIX}{os.getpid()}-{secrets.token_hex(4)}"


def remove_leftovers(workspace: Path, owner: int) -> None:
    """Remove a server's workspace and the shared memory that its Triton named after it."""
    shutil.rmtree(workspace, ignore_errors=True)
    for block in Path("/dev/shm").glob(f"pytrtion{owner}-*"):  # PyTriton's spelling
        block.unlink(missing_ok=True)
