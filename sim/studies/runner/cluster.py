"""Calls answered by the workers of a Dask cluster: the same answers as from processes of this machine."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from sim import __version__
from sim.base.errors import BadInput, CheckFailed, MoesimError
from sim.base.extras import need
from sim.base.interrupts import heard, held
from sim.studies.runner.pool import finished

if TYPE_CHECKING:
    from concurrent.futures import Future

    from sim.studies.runner.pool import After, Answers, Call

CONNECT_S = 10.0
CLOSE_S = 2.0
LOOK_S = 0.01
LOGGERS = ("distributed", "tornado", "asyncio")
ONE_AT_A_TIME = threading.Lock()


def answers_of(address: str) -> Answers:
    """`sim.studies.runner.pool.answers` by the cluster whose scheduler is at `tcp://HOST:PORT`.

    A worker that ends without an answer loses nothing: the scheduler hands its calls to others. Workers read the same
    files by the same names, and have to have this version installed.

    Raises:
        BadInput: Dask is not installed here, or the address is none.
    """
    need(f"--cluster {address}", "distributed")
    if "://" not in address:
        raise BadInput(
            f"--cluster, got {address!r}: an address is tcp://HOST:PORT or tls://HOST:PORT, as `dask scheduler` prints "
            "it"
        )
    return lambda calls, _workers, after=None: _answers(address, calls, after)


def _answers(address: str, calls: Sequence[Call], after: After | None) -> Generator[tuple[int, Any], None, None]:
    if not calls:
        return
    import distributed
    from distributed.scheduler import KilledWorker

    said = f"--cluster, got {address!r}"
    own: list[BaseException | None] = []  # what calls themselves have raised

    # Dask's threads set events that this one waits for: Ctrl-C must not come in the middle of that.
    with held(), _silent():
        _greet(address)
        client: Any = None
        try:
            make: Any = distributed.Client
            client = make(address, timeout=CONNECT_S, set_as_default=False)
            _check(client, address)
            executor = client.get_executor(pure=False)

            def submit(call: Call) -> Future[Any]:
                future: Future[Any] = executor.submit(_call, *call)
                future.add_done_callback(lambda done: own.extend([] if done.cancelled() else [done.exception()]))
                return future

            def look() -> None:
                if client.status != "running":
                    raise ConnectionError("it has gone")

            yield from finished(calls, submit, after, look)
        except MoesimError:
            raise
        except KilledWorker:
            raise CheckFailed(
                f"{said}: several workers ended without an answer to one call (out of memory?); what is recorded "
                "stays: give them more, and add --resume"
            ) from None
        except (Exception, CancelledError) as error:
            if any(error is one for one in own):
                raise
            raise CheckFailed(
                f"{said}: the scheduler has gone, or has dropped the work ({_short(error)}); what is recorded stays: "
                "start it again, and add --resume"
            ) from None
        finally:
            if client is not None:
                with suppress(Exception, asyncio.CancelledError):  # nobody may be there any more
                    client.close(timeout=CLOSE_S)


@contextmanager
def _silent() -> Iterator[None]:
    """Dask logs tracebacks of all that goes wrong with a connection; here one line says it."""
    made = [each for name, each in logging.root.manager.loggerDict.items() if name.split(".")[0] in LOGGERS]
    loud = [each for each in made if isinstance(each, logging.Logger) and not each.disabled]
    for logger in loud:
        logger.disabled = True
    try:
        yield
    finally:
        for logger in loud:
            logger.disabled = False


def _greet(address: str) -> None:
    """Ask who answers there. A client would wait for ever for something else that listens.

    Raises:
        BadInput: nobody answers in time, or something that is no scheduler.
    """
    found: list[str | BaseException] = []

    def in_a_thread() -> None:  # a notebook has a running loop in this one
        try:
            found.append(asyncio.run(_asked(address)))
        except Exception as error:
            found.append(error)  # MemoryError, too: bytes of another protocol, read as a length

    thread = threading.Thread(target=in_a_thread, daemon=True)
    thread.start()
    deadline_s = time.monotonic() + 2 * CONNECT_S
    while thread.is_alive() and time.monotonic() < deadline_s:
        time.sleep(LOOK_S)
        heard()
    who = found[0] if found else TimeoutError()
    if who == "Scheduler":
        return
    if isinstance(who, str):
        said = f"a {who.lower()} answers there, and no scheduler"
    elif isinstance(who, MemoryError):
        said = "no scheduler answers there, but something else does"
    else:
        said = f"no scheduler answers there ({_short(who)})"
    raise BadInput(
        f"--cluster, got {address!r}: {said}; start one with `dask scheduler`, and workers with "
        "`dask worker ADDRESS --nthreads 1`"
    )


async def _asked(address: str) -> str:
    import distributed
    from distributed.security import Security

    rpc: Any = distributed.rpc
    security: Any = Security
    there = rpc(address, timeout=CONNECT_S, connection_args=security().get_connection_args("client"))
    try:
        return str((await asyncio.wait_for(there.identity(), CONNECT_S))["type"])
    finally:
        await there.close_rpc()


def _short(error: BaseException) -> str:
    said = " ".join(str(error).split())
    return f"{type(error).__name__}: {said[:200]}" if said else type(error).__name__


def _check(client: Any, address: str) -> None:
    """Raises BadInput for a cluster without workers, or with workers of another version."""
    try:
        client.wait_for_workers(1, timeout=CONNECT_S)
    except TimeoutError:
        raise BadInput(
            f"--cluster, got {address!r}: it has no workers; start some with `dask worker {address} --nthreads 1`"
        ) from None
    versions = client.run(_version, on_error="return")
    other = {where: found for where, found in versions.items() if found != __version__}
    if other:
        where, found = next(iter(other.items()))
        said = f"{type(found).__name__} ({found})" if isinstance(found, BaseException) else f"version {found}"
        raise BadInput(
            f"--cluster, got {address!r}: worker {where} answers with {said}, this is version {__version__}; install "
            "the same on every worker"
        )


def _version() -> str:
    return __version__


def _call(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """One call at a time: a worker of many threads gains nothing from them, and policies need not be ready for any."""
    with ONE_AT_A_TIME:
        return function(*arguments)
