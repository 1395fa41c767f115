"""DALI: a greedy division of each layer's experts, prefetching by predicted workload, a workload-aware cache."""

from policies.dali.policy import Dali as Dali
