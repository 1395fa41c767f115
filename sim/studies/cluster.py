"""Calls answered by the workers of a Dask cluster: the same answers as from processes of this machine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any

from sim import __version__
from sim.base.errors import BadInput, CheckFailed
from sim.studies.pool import Order

if TYPE_CHECKING:
    from sim.studies.pool import Call

CONNECT_S = 10.0
ONE_AT_A_TIME = threading.Lock()


def answers_of(address: str) -> Callable[[Sequence[Call], int], Generator[tuple[int, Any], None, None]]:
    """`sim.studies.pool.answers` by the cluster whose scheduler is at `tcp://HOST:PORT`.

    A worker that ends without an answer loses nothing: the scheduler hands its calls to others. Workers read the same
    files by the same names, and have to have this version installed.

    Raises:
        BadInput: Dask is not installed here, or the address is none.
    """
    try:
        import distributed  # noqa: F401 - found out now, before anything is resolved
    except ImportError:
        raise BadInput(
            f"--cluster, got {address!r}: Dask is not installed here; pip install 'moe-offload-sim[cluster]'"
        ) from None
    if "://" not in address:
        raise BadInput(f"--cluster, got {address!r}: an address is tcp://HOST:PORT, as `dask scheduler` prints it")

    def answered(calls: Sequence[Call], workers: int) -> Generator[tuple[int, Any], None, None]:  # noqa: ARG001
        if calls:
            yield from _answers(address, calls)

    return answered


def _answers(address: str, calls: Sequence[Call]) -> Generator[tuple[int, Any], None, None]:
    import distributed
    from distributed.scheduler import KilledWorker

    try:
        make: Any = distributed.Client
        client = make(address, timeout=CONNECT_S, set_as_default=False)
    except (OSError, ValueError) as error:
        raise BadInput(
            f"--cluster, got {address!r}: no scheduler answers there ({type(error).__name__}); start one with "
            "`dask scheduler`, and workers with `dask worker ADDRESS --nthreads 1`"
        ) from None
    try:
        _check(client, address)
        order = Order(calls)

        def begin(some: Sequence[tuple[int, Call]]) -> dict[Any, int]:
            return {client.submit(_call, *call, pure=False): index for index, call in some}

        futures = begin(order.first())
        as_completed: Any = distributed.as_completed
        done = as_completed(futures, loop=client.loop)
        for future in done:
            if future.status != "finished":
                why = future.exception()
                if isinstance(why, KilledWorker):
                    raise CheckFailed(
                        f"--cluster, got {address!r}: several workers ended without an answer to one call (out of "
                        "memory?); what is recorded stays: give them more, and add --resume"
                    )
                if future.status == "cancelled" or why is None:
                    raise CheckFailed(
                        f"--cluster, got {address!r}: the scheduler has gone, or has dropped the work; what is "
                        "recorded stays: start it again, and add --resume"
                    )
                raise why
            index, answer = futures.pop(future), future.result()
            more = begin(order.freed(index, answer))
            futures |= more
            done.update(more)
            yield index, answer
            future.release()
    finally:
        client.close(timeout=CONNECT_S)


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
