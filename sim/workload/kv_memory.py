"""Memory for keys and values, page by page: who may start, who may grow by a token, and who has to make room.

A page holds a fixed number of tokens of one request (PagedAttention: Kwon et al., "Efficient Memory Management for
Large Language Model Serving", SOSP 2023, arXiv 2309.06180), with their keys and values in all layers. The rules are
those of that paper's vLLM: a request starts when its prompt's pages are free, a running one takes a page when a token
needs it, and where none is left whoever came last makes room.
"""

from __future__ import annotations

from bisect import insort
from typing import TYPE_CHECKING

import msgspec

from sim.base.errors import BadInput
from sim.base.units import show_bytes, show_count

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sim.workload.batching import Running
    from sim.workload.iterations import RequestInfo

SWAP = "swap"
"""Pages of whom makes room go to host memory, and come back before it goes on. Else they are freed; taken again, prompt
and what it has put out are prefilled anew as one prompt."""
WATERMARK_FRAC = 0.01
"""Of all pages; so many stay free where a request starts beside others, so that it is not sent away at once (the
`watermark` of vLLM's block manager, 0.01 in release 0.2.7). Rounded down, as there: pools of fewer than 100
pages have none."""


class KvPool(msgspec.Struct, frozen=True):
    """A GPU's memory for keys and values.

    Attributes:
        swaps: who makes room goes to host memory, instead of being computed anew.
    """

    n_pages: int
    page_tokens: int
    page_bytes: int
    swaps: bool = False

    @classmethod
    def of(cls, n_bytes: int, page_tokens: int, token_bytes: int, preempt: str) -> KvPool:
        """As many whole pages as fit. Raises BadInput where none does."""
        page_bytes = page_tokens * token_bytes
        if n_bytes < page_bytes:
            raise BadInput(
                f"--kv-memory, got {show_bytes(n_bytes)}: one page of {show_count(page_tokens, 'token')} takes "
                f"{show_bytes(page_bytes)}; give more, or a smaller --set kv.page"
            )
        return cls(n_bytes // page_bytes, page_tokens, page_bytes, preempt == SWAP)

    @property
    def watermark_pages(self) -> int:
        """That stay free where a request starts beside others."""
        return int(WATERMARK_FRAC * self.n_pages)

    def pages(self, n_tokens: int) -> int:
        """That so many tokens of one request take."""
        return -(-n_tokens // self.page_tokens)

    def most_pages(self, request: RequestInfo) -> int:
        """Of a request, with its last token but one: the last is put out, and nothing is computed from it."""
        return self.pages(request.prompt_len + request.outputs - 1)

    def check(self, requests: Iterable[RequestInfo], n_bytes: int) -> None:
        """Raises BadInput where a request would not fit, had it all pages of the `n_bytes` for itself."""
        largest = max(requests, key=self.most_pages)
        need = self.most_pages(largest)
        if need > self.n_pages:
            n_tokens = largest.prompt_len + largest.outputs - 1
            raise BadInput(
                f"--kv-memory, got {show_bytes(n_bytes)} "
                f"({show_count(self.n_pages, 'page')} of {self.page_tokens} tokens): request {largest.index} needs "
                f"{need} for its {n_tokens:,} tokens; give at least {-(-need * self.page_bytes // 10**6)}MB"
            )


class KvMemory:
    """Who holds how many pages, and who waits for some after it had to make room.

    Whoever came first is never sent away while another runs, and everyone fits alone (`KvPool.check`): so somebody
    always goes on. Whoever was sent away comes back before any other starts.

    Attributes:
        away: requests that were sent away, the first to come first. left, outs, ins: since `step`, who was sent away,
            and how many pages of each request go to host memory or come back.
    """

    def __init__(self, pool: KvPool) -> None:
        self.pool = pool
        self.n_free = pool.n_pages
        self.held: dict[int, int] = {}  # by request
        self.away: list[Running] = []
        self.left: list[RequestInfo] = []
        self.outs: list[int] = []
        self.ins: list[int] = []
        self.n_preemptions: dict[int, int] = {}  # by request, of those that were
        self.recomputed_tokens = 0
        self.n_out_pages = 0
        self.n_in_pages = 0
        self.peak_pages = 0
        self._swapped: dict[int, int] = {}  # pages in host memory, by request
        self.peak_swapped_pages = 0
        self._page_s = 0.0  # pages held, times seconds
        self._first_s = self._now_s = -1.0

    # -- what it came to --------------------------------------------------------------------------------------------

    @property
    def n_used(self) -> int:
        """Pages held now."""
        return self.pool.n_pages - self.n_free

    @property
    def mean_pages(self) -> float | None:
        """Held on average, from the first iteration to the last; None where that took no time."""
        span_s = self._now_s - self._first_s
        return self._page_s / span_s if span_s > 0 else None

    def step(self, now_s: float) -> None:
        """An iteration is composed at this time: pages have been held until then, and nobody has left yet."""
        if self._first_s < 0:
            self._first_s = self._now_s = now_s
        self._page_s += self.n_used * (now_s - self._now_s)
        self._now_s = now_s
        self.told()

    def told(self) -> None:
        """Whoever wants to know has been told of `left`, `outs` and `ins`."""
        if self.left or self.ins:
            self.left, self.outs, self.ins = [], [], []

    # -- who may start, and grow ------------------------------------------------------------------------------------

    def fits(self, n_tokens: int, n_running: int) -> bool:
        """Whether a request with so many tokens may start beside so many others."""
        kept = self.pool.watermark_pages if n_running else 0
        return self.n_free - self.pool.pages(n_tokens) >= kept

    def hold(self, request: RequestInfo, n_tokens: int) -> None:
        """Give a request the pages of so many tokens, with those that it has; they must be free."""
        has = self.held.get(request.index, 0)
        needs = self.pool.pages(n_tokens)
        if needs > has:
            self.n_free -= needs - has
            self.held[request.index] = needs
            self.peak_pages = max(self.peak_pages, self.n_used)

    def give_back(self, request: RequestInfo, n_tokens: int) -> None:
        """It goes on with so many tokens: pages that others lay in are free."""
        too_many = self.held[request.index] - self.pool.pages(n_tokens)
        if too_many > 0:
            self.held[request.index] -= too_many
            self.n_free += too_many

    def free(self, request: RequestInfo) -> None:
        """It is complete, or has made room: its pages are free."""
        self.n_free += self.held.pop(request.index, 0)

    def make_room(self, running: list[Running]) -> list[Running]:
        """Give all that run the page of their next token, first come first; those of them that still run then."""
        pool, held = self.pool, self.held
        if all(one.next_tokens <= held[one.request.index] * pool.page_tokens for one in running):
            return running
        first_come = sorted(running, key=_place)
        at = 0
        while at < len(first_come):
            one = first_come[at]
            while pool.pages(one.next_tokens) - held[one.request.index] > self.n_free:
                last = first_come.pop()
                self._send_away(last)
                if last is one:
                    break
            else:
                self.hold(one.request, one.next_tokens)
            at += 1
        return [one for one in running if one.request.index in held]

    def _send_away(self, one: Running) -> None:
        request, n_tokens = one.request, one.row - one.request.first_row
        self.n_preemptions[request.index] = self.n_preemptions.get(request.index, 0) + 1
        self.left.append(request)
        self.free(request)
        insort(self.away, one, key=_place)
        if self.pool.swaps:
            n_pages = self._swapped[request.index] = self.pool.pages(n_tokens)
            self.n_out_pages += n_pages
            self.outs.append(n_pages)
            self.peak_swapped_pages = max(self.peak_swapped_pages, sum(self._swapped.values()))
        else:
            self.recomputed_tokens += n_tokens
            one.start_over()

    def back(self, n_running: int) -> Running | None:
        """The first of those that were sent away, where its pages are free; they are its own again."""
        if not self.away or not self.fits(self.away[0].next_tokens, n_running):
            return None
        one = self.away.pop(0)
        self.hold(one.request, one.next_tokens)
        n_pages = self._swapped.pop(one.request.index, 0)
        if n_pages:
            self.n_in_pages += n_pages
            self.ins.append(n_pages)
        return one


def _place(one: Running) -> int:
    """In the order of arrival."""
    return one.request.index
