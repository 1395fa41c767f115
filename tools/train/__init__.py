"""Train a small Mixture-of-Experts model of a published routing shape, from free text to a trace that ships.

The chain, each step a module: `corpus` (packages -> documents, by `extract`), `tokens` (documents -> byte-level BPE
ids), `train` (`trainer` is one run of a `model`, `fast` its forward, `schedule` its rates and balance, `begin` what it
begins from, `log` what it was told), `evaluate` (held-out loss against n-grams, expert load, gate reuse), `chat` (draws
requests), `moesim record` (runs them), `pack` (stores them in few bits). Needs torch, transformers and tokenizers.
"""
