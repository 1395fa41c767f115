"""HOBBIT (arXiv 2411.01433): missing experts of little weight come in low precision, or not at all."""

from policies.hobbit.policy import Hobbit as Hobbit
