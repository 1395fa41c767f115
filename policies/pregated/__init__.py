"""Pre-gated MoE (ISCA'24, arXiv 2308.12066): each block's gate chooses the experts of the block after it."""

from policies.pregated.policy import PreGated as PreGated
