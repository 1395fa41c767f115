"""A cache rule in C++ or CUDA, called through ctypes: the example of docs/native_rules.md."""

from ctypes import CDLL, c_int32, c_void_p
from pathlib import Path

import numpy as np

from sim.policy import BadInput, Policy, param


class NativeRule(Policy):
    """Evict whom a shared library names."""

    name = "native_rule"
    title = "A cache rule in a shared library"
    source = "docs/native_rules.md"
    library: str = param("", "shared library of the rule; lfu_rule.so beside this file unless told", file=True)

    def bind(self, view):
        path = Path(self.library or Path(__file__).with_name("lfu_rule.so")).resolve()
        try:
            rule = CDLL(str(path))
        except OSError as error:
            told = f"{error}; build it as docs/native_rules.md shows"
            raise BadInput(f"library, got {path}: {told}") from None
        rule.rule_new.restype = c_void_p
        rule.rule_new.argtypes = [c_int32, c_int32]
        rule.rule_free.argtypes = [c_void_p]
        rule.rule_accessed.argtypes = rule.rule_evicted.argtypes = [c_void_p, c_int32]
        rule.rule_victim.argtypes = [c_void_p, c_void_p]
        self._rule, self._state = rule, rule.rule_new(view.n_layers, view.n_experts)
        self._pinned = np.zeros(view.n_layers * view.n_experts, dtype=np.uint8)

    def accessed(self, piece, hit, view):
        self._rule.rule_accessed(self._state, piece.index)

    def evicted(self, piece, view):
        self._rule.rule_evicted(self._state, piece.index)

    def victim(self, piece, speculative, view):
        running = [view.piece(view.layer, expert).index for expert in view.pending_experts()]
        self._pinned[running] = 1  # the running layer has still to compute them
        index = self._rule.rule_victim(self._state, self._pinned.ctypes.data)
        self._pinned[running] = 0
        return None if index < 0 else view.piece(*divmod(index, view.n_experts))

    def __del__(self):
        if hasattr(self, "_state"):
            self._rule.rule_free(self._state)
