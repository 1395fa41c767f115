"""Hits of a cache of every size from one pass over what it is asked for (Mattson, Gecsei, Slutz and Traiger,
"Evaluation techniques for storage hierarchies", IBM Systems Journal 9(2), 1970).

Mattson's caches are asked for one item at a time; these are asked for several, a *group*: the experts of a layer. The
cache demands those that are missing while none of the group may leave; those that find no room then follow one by one,
each in the place of the least of all, since the others have run. What was there runs first, in the order of the gate.

A piece is a number below `n`. Sizes are counted in pieces.
"""

from __future__ import annotations

from collections.abc import Sequence

from sim.base.flat import ints


class _Stack:
    """Counts hits by kind of visit (a phase, for one) and size.

    Args:
        n: pieces. most: of a group. n_kinds: of visits.
    """

    def __init__(self, n: int, most: int, n_kinds: int) -> None:
        self.n = n
        self.most = most
        self._changes = ints(n_kinds * (n + 2))  # hits of a size less those of the size below

    def hits(self, kind: int) -> list[int]:
        """Hits of visits of that kind by size, from 0 to `n`."""
        first, total, found = kind * (self.n + 2), 0, []
        for size in range(self.n + 1):
            total += self._changes[first + size]
            found.append(total)
        return found


class RecencyStack(_Stack):
    """Least recently used, in every size at once.

    What was there runs before what is copied, so the order within a group depends on the size of the cache: a size that
    holds some of a group knows its order; groups stand in the order of their visits.
    """

    def __init__(self, n: int, most: int, n_kinds: int = 1) -> None:
        super().__init__(n, most, n_kinds)
        self._n_seen = 0
        self._n_groups = 0
        self._groups = 2 * n + 2  # beyond so many they are numbered anew: `n` at most have members
        self._tree = ints(self._groups)  # Fenwick's, of members by group
        self._count = ints(self._groups)
        self._last = ints(self._groups, -1)  # its member that the gate named last
        self._group = ints(n)  # of each piece; 0: never asked for
        self._before = ints(n, -1)  # in its group
        self._behind = ints(n, -1)
        # In which sizes it was there when it was asked for: all from `_least`, and of those from `_from` the marked.
        self._least = ints(n)
        self._from = ints(n)
        self._marks = ints(n * most)
        self._new_least = ints(most)
        self._new_from = ints(most)
        self._new_marks = ints(most * most)
        self._place = ints(n)  # of a piece in the group that is asked for, from 1

    def visit(self, ids: Sequence[int], at: int, n: int, first: int, kind: int) -> None:
        """Ask for the group `first + ids[at:at + n]`, pieces in the order of the gate, no two alike."""
        if self._n_groups + 1 >= self._groups:
            self._renumber()
        for i in range(n):
            self._place[first + ids[at + i]] = i + 1
            self._new_least[i] = -1
        for i in range(n):
            if self._new_least[i] < 0:
                self._look_up(first + ids[at + i], i)
        changes, row = self._changes, kind * (self.n + 2)
        for i in range(n):
            changes[row + self._new_least[i]] += 1
            for size in range(self._new_from[i], self._new_least[i]):
                if self._new_marks[i * self.most + size - self._new_from[i]]:
                    changes[row + size] += 1
                    changes[row + size + 1] -= 1
        for i in range(n):
            self._leave(first + ids[at + i])
        self._n_groups += 1
        for i in range(n):
            self._join(first + ids[at + i], i)
        self._add(self._n_groups, n)

    def _look_up(self, piece: int, i: int) -> None:
        """In which sizes a piece is there, and with it all of its group that are asked for."""
        group = self._group[piece]
        if not group:
            self._new_least[i] = self._new_from[i] = self.n + 1
            return
        newer, n = self._n_seen - self._up_to(group), self._count[group]
        member = self._last[group]
        while member >= 0:
            j = self._place[member] - 1
            if j >= 0:
                self._new_from[j] = newer + 1
                self._new_least[j] = newer + n
            member = self._before[member]
        for room in range(1, n):  # what came by a copy ran last; of what ran last a smaller cache holds so many
            left = room
            for missed in range(1, -1, -1):
                member = self._last[group]
                while member >= 0:
                    if self._was_there(member, newer + room) != missed:
                        j = self._place[member] - 1
                        if j >= 0:
                            self._new_marks[j * self.most + room - 1] = left > 0
                        left -= 1
                    member = self._before[member]

    def _was_there(self, piece: int, size: int) -> int:
        if size >= self._least[piece]:
            return 1
        if size < self._from[piece]:
            return 0
        return self._marks[piece * self.most + size - self._from[piece]]

    def _leave(self, piece: int) -> None:
        self._place[piece] = 0
        group = self._group[piece]
        if not group:
            self._n_seen += 1
            return
        before, behind = self._before[piece], self._behind[piece]
        if before >= 0:
            self._behind[before] = behind
        if behind >= 0:
            self._before[behind] = before
        else:
            self._last[group] = before
        self._count[group] -= 1
        self._add(group, -1)

    def _join(self, piece: int, i: int) -> None:
        group = self._n_groups
        before = self._last[group] if i else -1
        self._group[piece] = group
        self._before[piece] = before
        self._behind[piece] = -1
        if before >= 0:
            self._behind[before] = piece
        self._last[group] = piece
        self._count[group] = i + 1
        self._least[piece] = self._new_least[i]
        self._from[piece] = self._new_from[i]
        for mark in range(self._new_least[i] - self._new_from[i]):
            self._marks[piece * self.most + mark] = self._new_marks[i * self.most + mark]

    def _add(self, group: int, n: int) -> None:
        while group < self._groups:
            self._tree[group] += n
            group += group & -group

    def _up_to(self, group: int) -> int:
        total = 0
        while group:
            total += self._tree[group]
            group -= group & -group
        return total

    def _renumber(self) -> None:
        n_groups = 0
        for group in range(1, self._n_groups + 1):
            self._tree[group] = 0
        for group in range(1, self._n_groups + 1):
            if self._count[group]:
                n_groups += 1
                self._count[n_groups] = self._count[group]
                self._last[n_groups] = member = self._last[group]
                while member >= 0:
                    self._group[member] = n_groups
                    member = self._before[member]
        for group in range(n_groups + 1, self._groups):
            self._tree[group] = 0
            self._count[group] = 0
        self._n_groups = n_groups
        for group in range(1, n_groups + 1):
            self._add(group, self._count[group])


class RankStack(_Stack):
    """The least rank leaves, in every size at once, where ranks do not depend on the size.

    A cache of C that holds a whole group of m holds the C - m best of what else was there, too. Let C + 1 have held the
    same and one piece more: one candidate more at most, and one place more, so it still holds all that C does. So a
    stack of pieces says what each size holds: its first C. A group that is larger than C ends that: the piece that came
    last stays, however it ranks. Such a size goes its own way until it holds what the stack says again.

    Args:
        base: where ranks of these pieces begin. ties: of equal ranks the piece whose number here is least leaves.
    """

    def __init__(self, n: int, most: int, ties: Sequence[int], base: int = 0, n_kinds: int = 1) -> None:
        super().__init__(n, most, n_kinds)
        self._base = base
        self._ties = ints(n)
        for piece in range(n):
            self._ties[piece] = ties[piece]
        self._stack = ints(n)
        self._n_seen = 0
        self._n_visits = 0
        self._asked = ints(n)  # the last visit that asked for it
        self._heap = ints(n + 1)  # pieces on their way down, the best first
        self._n_heap = 0
        self._n_apart = 0
        self._apart = ints(most + 1)  # by size, whether it goes its own way
        self._own = ints((most + 1) * most)  # what it holds
        self._n_own = ints(most + 1)
        self._n_marks = 0
        self._marks = ints(n)
        self._later = ints(most)

    def visit(self, ids: Sequence[int], at: int, n: int, first: int, kind: int, rank: Sequence[float]) -> None:
        """Ask for the group `first + ids[at:at + n]`, pieces in the order of the gate, no two alike.

        Args:
            rank: by `base` + piece.
        """
        self._n_visits += 1
        for i in range(n):
            self._asked[first + ids[at + i]] = self._n_visits
        changes, row = self._changes, kind * (self.n + 2)
        if self._n_apart or n > 1:
            for size in range(1, min(self.most, self.n) + 1):
                if size < n and not self._apart[size]:
                    self._part(size)
                if self._apart[size]:
                    n_hits = self._exchange(size, ids, at, n, first, rank)
                    changes[row + size] += n_hits
                    changes[row + size + 1] -= n_hits
        self._restack(ids, at, n, first, row, rank)
        if self._n_apart:
            for size in range(n, self.most + 1):
                if self._apart[size] and self._is_prefix(size):
                    self._apart[size] = 0
                    self._n_apart -= 1

    def _restack(self, ids: Sequence[int], at: int, n: int, first: int, row: int, rank: Sequence[float]) -> None:
        """The group first; then for each further size the best of what did not find room in a smaller one."""
        n_found = 0
        for place in range(self._n_seen):
            piece = self._stack[place]
            if self._asked[piece] == self._n_visits:
                n_found += 1
                self._count(place + 1, row)
                if place >= n:
                    self._stack[place] = self._pop(rank)
            elif place < n:
                self._push(piece, rank)
            elif self._is_less(piece, self._heap[0], rank):
                self._stack[place] = self._heap[0]
                self._heap[0] = piece
                self._sink(rank)
            if n_found == n and not self._n_heap and place + 1 >= n:
                break  # nothing is on its way: below it nobody moves
        for i in range(n):
            self._stack[i] = first + ids[at + i]
        for place in range(max(self._n_seen, n), self._n_seen + n - n_found):
            self._stack[place] = self._pop(rank)
        self._n_seen += n - n_found

    def _count(self, size: int, row: int) -> None:
        """A hit of every size from this one that the stack speaks for."""
        self._changes[row + size] += 1
        if self._n_apart:
            for other in range(size, self.most + 1):
                if self._apart[other]:
                    self._changes[row + other] -= 1
                    self._changes[row + other + 1] += 1

    def _part(self, size: int) -> None:
        self._apart[size] = 1
        self._n_apart += 1
        self._n_own[size] = min(size, self._n_seen)
        for place in range(self._n_own[size]):
            self._own[size * self.most + place] = self._stack[place]

    def _exchange(self, size: int, ids: Sequence[int], at: int, n: int, first: int, rank: Sequence[float]) -> int:
        """One cache, by its rules. Returns its hits."""
        own, start, now = self._own, size * self.most, self._n_visits
        here, n_hits, n_later = self._n_own[size], 0, 0
        self._n_marks += 1
        for place in range(start, start + here):
            self._marks[own[place]] = self._n_marks
            n_hits += self._asked[own[place]] == now
        others = here - n_hits
        for i in range(n):
            piece = first + ids[at + i]
            if self._marks[piece] == self._n_marks:
                continue
            if here < size:
                own[start + here] = piece
                here += 1
            elif others:
                own[self._least(start, here, now, rank)] = piece
                others -= 1
            else:
                self._later[n_later] = piece
                n_later += 1
        for i in range(n_later):
            own[self._least(start, here, 0, rank)] = self._later[i]
        self._n_own[size] = here
        return n_hits

    def _least(self, start: int, n: int, but: int, rank: Sequence[float]) -> int:
        """The place of who leaves, of those that visit `but` did not ask for."""
        found = -1
        for place in range(start, start + n):
            piece = self._own[place]
            if self._asked[piece] != but and (found < 0 or self._is_less(piece, self._own[found], rank)):
                found = place
        return found

    def _is_prefix(self, size: int) -> bool:
        if self._n_own[size] != min(size, self._n_seen):
            return False
        self._n_marks += 1
        for place in range(self._n_own[size]):
            self._marks[self._stack[place]] = self._n_marks
        for place in range(self._n_own[size]):
            if self._marks[self._own[size * self.most + place]] != self._n_marks:
                return False
        return True

    def _is_less(self, piece: int, other: int, rank: Sequence[float]) -> bool:
        mine, its = rank[self._base + piece], rank[self._base + other]
        return mine < its or (mine == its and self._ties[piece] < self._ties[other])

    def _push(self, piece: int, rank: Sequence[float]) -> None:
        heap, at = self._heap, self._n_heap
        self._n_heap += 1
        while at:
            above = (at - 1) >> 1
            if not self._is_less(heap[above], piece, rank):
                break
            heap[at] = heap[above]
            at = above
        heap[at] = piece

    def _pop(self, rank: Sequence[float]) -> int:
        best = self._heap[0]
        self._n_heap -= 1
        self._heap[0] = self._heap[self._n_heap]
        self._sink(rank)
        return best

    def _sink(self, rank: Sequence[float]) -> None:
        heap, n, at = self._heap, self._n_heap, 0
        piece = heap[0]
        while 2 * at + 1 < n:
            below = 2 * at + 1
            if below + 1 < n and self._is_less(heap[below], heap[below + 1], rank):
                below += 1
            if not self._is_less(piece, heap[below], rank):
                break
            heap[at] = heap[below]
            at = below
        heap[at] = piece
